"""Rotary embedding of interleaved pairs: one Triton kernel, launched directly.

    y_2p = x_2p * cos_p - x_2p+1 * sin_p,   y_2p+1 = x_2p+1 * cos_p + x_2p * sin_p       per token and head, in float32

cos and sin are row t of their tables for token t of every batch: column p, or column 2p where `interleaved` is set and
the table is as wide as the head. The product with cos is rounded to float32, the one with sin is added unrounded (a
fused multiply-add), and the sum is rounded once to x's dtype: upstream's order, so results agree bit by bit.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/rotary.py` (Apache-2.0); the code is our own.

Idea: the op only streams. A program takes all heads of a token where they fit, so cos and sin are loaded once. All
its loads are issued before the first use, 16 bytes a thread, whole heads in a row: pairs are split and joined inside
a thread's registers. (Upstream loads even and odd elements apart, so each of its loads uses half of what it fetches.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, output_strides
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_tile, store_tile
from kda_runtime.tuned_table import Table

from . import common
from .common import Config, Strides, first_of_program, strides

TUNED = Table(__file__, "rotary", Config)
"""Tuned configurations, chosen by `bytes` (of x)."""


# --- kernel


@triton.jit
def rotary_kernel(
    out,  # [BATCH, TOKENS, ALL_HEADS, DIM]
    x,  # as out
    cos,  # [TOKENS or more, columns]
    sin,  # as cos
    OUT: tl.constexpr,  # `Strides` of every operand; `column` of cos and sin is the step from pair to pair
    X: tl.constexpr,
    COS: tl.constexpr,
    SIN: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2, padded to a power of two
    CUT: tl.constexpr,
):
    """One program: CUT.tokens tokens, up to CUT.heads * CUT.tiles of the heads of each."""
    batch, token, row_of_all, first = first_of_program(CUT)
    x += row_of_all * X.token + batch * X.jump
    out += row_of_all * OUT.token + batch * OUT.jump
    cos += token * COS.token
    sin += token * SIN.token
    # 64 bits: heads of a permuted x, or columns of a transposed table, may be far apart.
    row = tl.arange(0, CUT.heads)[:, None].to(tl.int64)  # [CUT.heads, 1]
    pair = tl.arange(0, HALF)[None, :].to(tl.int64)  # [1, HALF]
    element = tl.arange(0, 2 * HALF)[None, :]  # [1, 2 * HALF]

    follow_the_kernel_ahead(CUT.pdl)

    # Loads of all tiles first: a thread keeps CUT.tokens * CUT.tiles of them in flight.
    modifier: tl.constexpr = CUT.load  # a function takes no plain str in Triton 3.6
    loaded = ()
    for step in tl.static_range(CUT.tokens * CUT.tiles):
        head = first + step % CUT.tiles * CUT.heads + row  # [CUT.heads, 1]
        line = x + step // CUT.tiles * X.token + head * X.head
        loaded += (load_tile(line, element, head < ALL_HEADS, DIM, 2 * HALF != DIM, modifier),)

    cache: tl.constexpr = CUT.store
    for step in tl.static_range(CUT.tokens * CUT.tiles):
        now = step // CUT.tiles
        if step % CUT.tiles == 0:
            # What all heads of a token share, [1, HALF] each.
            angles = pair < DIM // 2
            c = tl.load(cos + now * COS.token + pair * COS.column, mask=angles, other=0.0).to(tl.float32)
            s = tl.load(sin + now * SIN.token + pair * SIN.column, mask=angles, other=0.0).to(tl.float32)
            c, s = tl.broadcast_to(c, CUT.heads, HALF), tl.broadcast_to(s, CUT.heads, HALF)
        block = loaded[step].to(tl.float32)  # [CUT.heads, 2 * HALF]
        a, b = tl.split(tl.reshape(block, CUT.heads, HALF, 2))
        y_a = tl.fma(-b, s, a * c).to(out.dtype.element_ty)
        y_b = tl.fma(a, s, b * c).to(out.dtype.element_ty)
        y = tl.reshape(tl.join(y_a, y_b), CUT.heads, 2 * HALF)
        head = first + step % CUT.tiles * CUT.heads + row
        line = out + now * OUT.token + head * OUT.head
        store_tile(line, y, element, head < ALL_HEADS, DIM, 2 * HALF != DIM, cache)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @property
    def step(self) -> int:
        """From one pair's column to the next one's."""
        return 2 if self.interleaved and self.cos.shape[1] == self.x.shape[-1] else 1


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, cos, sin = call[:3]
    batch, tokens, heads, dim = (1, *x.shape)[-4:]
    half = triton.next_power_of_2(dim // 2)
    config = TUNED.select(capability(x), bytes=x.nbytes)
    cut = common.cut(config, rotary_kernel, x, tokens, heads, 2 * half)
    return Launch.make(
        rotary_kernel,
        (tokens // cut.tokens * cut.parts, batch),
        x,  # for the output, which is like x
        *call[:3],
        OUT=strides(batch, tokens, *(0, *output_strides(x))[-4:-1]),
        X=strides(batch, tokens, *(0, *x.stride())[-4:-1]),
        COS=Strides(cos.stride(0), column=cos.stride(1) * call.step),
        SIN=Strides(sin.stride(0), column=sin.stride(1) * call.step),
        ALL_HEADS=heads,
        DIM=dim,
        HALF=half,
        CUT=cut,
        num_warps=cut.warps,
        launch_pdl=cut.pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    x, cos, sin = call[:3]
    expect(x.dim() in (3, 4), "x", "[tokens, heads, head size] or [batch, ...]", list(x.shape))
    tokens, _, dim = x.shape[-3:]
    expect(dim > 0 and dim % 2 == 0, "x", "an even head size", dim)
    expect(cos.dim() == 2, "cos", "two dimensions [tokens, columns]", list(cos.shape))
    expect(cos.shape[0] >= tokens, "cos", f"at least {tokens} rows, one per token", cos.shape[0])
    expect(cos.shape[1] >= dim // 2, "cos", f"at least {dim // 2} columns, one per pair", cos.shape[1])
    expect(sin.shape == cos.shape, "sin", f"shape {list(cos.shape)}, as cos", list(sin.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    return common.uncovered(call, batch=(1, *call.x.shape)[-4], head=call.x.shape[-1])


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x = call.x
    tokens, _, dim = x.shape[-3:]
    wide = torch.promote_types(x.dtype, torch.float32)
    # Tables of [tokens, 1, dim / 2].
    cos, sin = (table[:tokens, :: call.step][:, None, : dim // 2].to(wide) for table in call[1:3])
    a, b = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
    y = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.empty_like(x).copy_(y)


# --- public function

OP = Op(
    "apply_rotary_embedding",
    Call,
    kernel=rotary_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("x",),
    exact=(plan, _plain),
)


@OP.public
def apply_rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Turn the pairs (2p, 2p + 1) of every head by its token's angles.

    Args:
        x: [tokens, heads, head size] or [batch, tokens, heads, head size], even head size; the last stride is 1, others
            are free (packed qkv).
        cos: [tokens or more, columns], any strides, any floating-point dtype; row t is for token t.
        sin: as cos.
        interleaved: where the tables are as wide as the head, take columns 0, 2, 4, ... instead of the first half.
            It says nothing about x, whose pairs are always neighbours.

    Returns:
        A new tensor like x (`torch.empty_like`).

    Dtypes other than float16, bfloat16 and float32, other strides, and CPU tensors take plain PyTorch: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return OP.call(x, cos, sin, interleaved)
