"""LTX2's rotary embedding of split halves, each head with its own angles: one Triton kernel, launched directly.

    y_p = bf16(x_p * cos_p) - x_p+h * sin_p,   y_p+h = bf16(x_p+h * cos_p) + x_p * sin_p       per token and head

for 0 <= p < h, half the head size. The product with cos is rounded to bfloat16 (through the dtype of x * cos), whatever
x's dtype is; the product with sin and the sum are float32, and the result is rounded once to x's dtype. That order is
part of the op's contract, because models were trained and compared with it.

Semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/ltx2_rotary.py` (Apache-2.0); the code is our own.

Idea: the op only streams; a head's angles are as many bytes as the head. A thread loads 16 bytes of each of x's halves,
of cos and of sin, and stores two vectors: all operands have one layout, so no data is exchanged between threads. A
program takes as many heads of a token as fit, and issues all its loads before the first use. (0.5.12 gives each head a
warp and each lane one or two elements, 0.5.23 16 heads a program.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, output_strides, scattered
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_tile, store_tile
from kda_runtime.tuned_table import Table

from . import common
from .common import Config, first_of_program, strides

TUNED = Table(__file__, "ltx2_rotary", Config)
"""Tuned configurations, chosen by `bytes` (of x)."""


# --- kernel


@triton.jit
def first_product(x, cos):
    """The product in its own dtype (the wider of the two), rounded to bfloat16, as float32."""
    if x.dtype == tl.bfloat16 and cos.dtype == tl.bfloat16:
        # Exact in float32, so this is one rounding, as a bfloat16 multiplication is.
        x, cos = x.to(tl.float32), cos.to(tl.float32)
    return (x * cos).to(tl.float32).to(tl.bfloat16).to(tl.float32)


@triton.jit
def ltx2_rotary_kernel(
    out,  # [BATCH, TOKENS, ALL_HEADS * 2 * HALF_DIM]
    x,  # as out
    cos,  # [BATCH, ALL_HEADS, TOKENS, HALF_DIM]
    sin,  # as cos
    OUT: tl.constexpr,  # `Strides` of every operand
    X: tl.constexpr,
    COS: tl.constexpr,
    SIN: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,  # HALF_DIM, padded to a power of two
    CUT: tl.constexpr,
):
    """One program: CUT.tokens tokens, up to CUT.heads * CUT.tiles of the heads of each."""
    batch, _, row_of_all, first = first_of_program(CUT)
    x += row_of_all * X.token + batch * X.jump
    out += row_of_all * OUT.token + batch * OUT.jump
    cos += row_of_all * COS.token + batch * COS.jump
    sin += row_of_all * SIN.token + batch * SIN.jump
    # 64 bits: heads of a [batch, heads, tokens, half] table may be far apart.
    row = tl.arange(0, CUT.heads)[:, None].to(tl.int64)  # [CUT.heads, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    PARTIAL: tl.constexpr = HALF != HALF_DIM

    follow_the_kernel_ahead(CUT.pdl)

    # Loads of all tiles first: a thread keeps four vectors of each in flight.
    modifier: tl.constexpr = CUT.load  # a function takes no plain str in Triton 3.6
    loaded = ()
    for step in tl.static_range(CUT.tokens * CUT.tiles):
        head = first + step % CUT.tiles * CUT.heads + row  # [CUT.heads, 1]
        inside = (head < ALL_HEADS) & (pair < HALF_DIM) if PARTIAL else head < ALL_HEADS
        line = x + step // CUT.tiles * X.token + head * X.head  # [CUT.heads, 1]
        at_cos = cos + step // CUT.tiles * COS.token + head * COS.head + pair
        at_sin = sin + step // CUT.tiles * SIN.token + head * SIN.head + pair
        a = load_tile(line, pair, head < ALL_HEADS, HALF_DIM, PARTIAL, modifier)  # [CUT.heads, HALF]
        b = load_tile(line + HALF_DIM, pair, head < ALL_HEADS, HALF_DIM, PARTIAL, modifier)
        loaded += ((a, b, tl.load(at_cos, mask=inside, other=0.0), tl.load(at_sin, mask=inside, other=0.0)),)

    cache: tl.constexpr = CUT.store
    for step in tl.static_range(CUT.tokens * CUT.tiles):
        a, b, c, s = loaded[step]
        s = s.to(tl.float32)
        y_a = tl.fma(-b.to(tl.float32), s, first_product(a, c))
        y_b = tl.fma(a.to(tl.float32), s, first_product(b, c))
        head = first + step % CUT.tiles * CUT.heads + row
        line = out + step // CUT.tiles * OUT.token + head * OUT.head
        store_tile(line, y_a, pair, head < ALL_HEADS, HALF_DIM, PARTIAL, cache)
        store_tile(line + HALF_DIM, y_b, pair, head < ALL_HEADS, HALF_DIM, PARTIAL, cache)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, cos, sin = call
    batch, heads, tokens, half_dim = cos.shape
    half = triton.next_power_of_2(half_dim)
    config = TUNED.select(capability(x), bytes=x.nbytes)
    cut = common.cut(config, ltx2_rotary_kernel, x, tokens, heads, half)
    return Launch.make(
        ltx2_rotary_kernel,
        (tokens // cut.tokens * cut.parts, batch),
        x,  # for the output, which is like x
        *call,
        OUT=strides(batch, tokens, *output_strides(x)[:2], 2 * half_dim),
        X=strides(batch, tokens, *x.stride()[:2], 2 * half_dim),
        COS=strides(batch, tokens, *cos.transpose(1, 2).stride()[:3]),
        SIN=strides(batch, tokens, *sin.transpose(1, 2).stride()[:3]),
        ALL_HEADS=heads,
        HALF_DIM=half_dim,
        HALF=half,
        CUT=cut,
        num_warps=cut.warps,
        launch_pdl=cut.pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    x, cos, sin = call
    expect(x.dim() == 3, "x", "three dimensions [batch, tokens, heads * head size]", list(x.shape))
    expect(cos.dim() == 4, "cos", "four dimensions [batch, heads, tokens, half]", list(cos.shape))
    batch, heads, tokens, half = cos.shape
    expected = [batch, tokens, heads * 2 * half]
    expect(list(x.shape) == expected, "x", f"shape {expected}, from cos", list(x.shape))
    expect(sin.shape == cos.shape, "sin", f"shape {list(cos.shape)}, as cos", list(sin.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x, cos, sin = call
    if {x.dtype, cos.dtype} == {torch.float16, torch.bfloat16}:
        return f"x has dtype {x.dtype} and cos {cos.dtype}, whose product is float32 in PyTorch and float16 in Triton"
    return common.uncovered(call, cos.shape[0], head=2 * cos.shape[3]) or scattered({"cos": cos, "sin": sin})


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x, cos, sin = call
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.unflatten(-1, (cos.shape[1], 2, cos.shape[3])).unbind(-2)  # [batch, tokens, heads, half]
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2).to(wide)
    y_a = (a * cos).to(torch.bfloat16).to(wide) - b.to(wide) * sin
    y_b = (b * cos).to(torch.bfloat16).to(wide) + a.to(wide) * sin
    return torch.empty_like(x).copy_(torch.stack((y_a, y_b), dim=-2).flatten(-3))


# --- public function

OP = Op(
    "apply_ltx2_split_rotary_emb",
    Call,
    kernel=ltx2_rotary_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("x",),
    exact=(plan, _plain),
)


@OP.public
def apply_ltx2_split_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (p, p + half) of every head by its own angles, with LTX2's order of rounding.

    Args:
        x: [batch, tokens, heads * 2 * half]; the last stride is 1, others are free.
        cos: [batch, heads, tokens, half], usually a view of [batch, tokens, heads, half]; the last stride is 1.
        sin: as cos.

    Returns:
        A new tensor like x (`torch.empty_like`).

    Other dtypes than float16, bfloat16 and float32, float16 mixed with bfloat16, other strides, and CPU tensors, take a
    plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return OP.call(x, cos, sin)
