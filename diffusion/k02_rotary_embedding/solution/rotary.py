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

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.calls import capability, check_tensors, elsewhere, given, output_strides, register
from kda_core.errors import expecting
from kda_core.launch import MISS, Launch, Plans, is_tracing
from kda_core.tuning import Table

from . import common
from .common import Config

OP = "apply_rotary_embedding"


# --- configuration and selection


TUNED = Table(__file__, "rotary", Config)
"""Features: `bytes` (of x)."""


# --- kernel


@triton.jit
def rotary_kernel(
    out,  # [BATCH, TOKENS, ALL_HEADS, DIM]
    x,  # [BATCH, TOKENS, ALL_HEADS, DIM]
    cos,  # [TOKENS or more, columns]
    sin,
    # Strides are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    OUT_JUMP: tl.constexpr,  # batch stride beyond TOKENS token strides
    OUT_TOKEN_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    X_JUMP: tl.constexpr,
    X_TOKEN_STRIDE: tl.constexpr,
    X_HEAD_STRIDE: tl.constexpr,
    COS_TOKEN_STRIDE: tl.constexpr,
    COS_PAIR_STRIDE: tl.constexpr,
    SIN_TOKEN_STRIDE: tl.constexpr,
    SIN_PAIR_STRIDE: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2, padded to a power of two
    HEADS: tl.constexpr,  # heads of a tile
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a program
    PARTS: tl.constexpr,  # programs of a token
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: TOKENS tokens, up to HEADS * TILES of the heads of each."""
    batch = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // PARTS).to(tl.int64) * TOKENS
    tokens = (tl.num_programs(0) // PARTS).to(tl.int64) * TOKENS
    first = tl.program_id(0) % PARTS * (HEADS * TILES)
    x += (batch * tokens + token) * X_TOKEN_STRIDE + batch * X_JUMP
    out += (batch * tokens + token) * OUT_TOKEN_STRIDE + batch * OUT_JUMP
    cos += token * COS_TOKEN_STRIDE
    sin += token * SIN_TOKEN_STRIDE
    # 64 bits: heads of a permuted x, or columns of a transposed table, may be far apart.
    row = tl.arange(0, HEADS)[:, None].to(tl.int64)  # [HEADS, 1]
    pair = tl.arange(0, HALF)[None, :].to(tl.int64)  # [1, HALF]
    element = tl.arange(0, 2 * HALF)[None, :]  # [1, 2 * HALF]

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads of all tiles first: a thread keeps TOKENS * TILES of them in flight.
    loaded = ()
    for step in tl.static_range(TOKENS * TILES):
        head = first + step % TILES * HEADS + row  # [HEADS, 1]
        inside = head < ALL_HEADS
        if 2 * HALF != DIM:
            inside = inside & (element < DIM)
        at = x + step // TILES * X_TOKEN_STRIDE + head * X_HEAD_STRIDE + element
        loaded += (tl.load(at, mask=inside, other=0.0),)

    for now in tl.static_range(TOKENS):
        # What all heads of a token share, [1, HALF] each.
        angles = pair < DIM // 2
        c = tl.load(cos + now * COS_TOKEN_STRIDE + pair * COS_PAIR_STRIDE, mask=angles, other=0.0).to(tl.float32)
        s = tl.load(sin + now * SIN_TOKEN_STRIDE + pair * SIN_PAIR_STRIDE, mask=angles, other=0.0).to(tl.float32)
        for tile in tl.static_range(TILES):
            block = loaded[now * TILES + tile].to(tl.float32)  # [HEADS, 2 * HALF]
            a, b = tl.split(tl.reshape(block, HEADS, HALF, 2))
            c_all, s_all = tl.broadcast_to(c, HEADS, HALF), tl.broadcast_to(s, HEADS, HALF)
            y_a = tl.fma(-b, s_all, a * c_all).to(out.dtype.element_ty)
            y_b = tl.fma(a, s_all, b * c_all).to(out.dtype.element_ty)

            head = first + tile * HEADS + row
            inside = head < ALL_HEADS
            if 2 * HALF != DIM:
                inside = inside & (element < DIM)
            at = out + now * OUT_TOKEN_STRIDE + head * OUT_HEAD_STRIDE + element
            tl.store(at, tl.reshape(tl.join(y_a, y_b), HEADS, 2 * HALF), mask=inside, cache_modifier=STORE)


# --- launcher


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    tensors = property(given)

    @property
    def step(self) -> int:
        """From one pair's column to the next one's."""
        return 2 if self.interleaved and self.cos.shape[1] == self.x.shape[-1] else 1


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, cos, sin = call[:3]
    batch, tokens, heads, dim = (1, *x.shape)[-4:]
    x_strides, out_strides = ((0, *strides)[-4:] for strides in (x.stride(), output_strides(x)))
    major = capability(x)
    config = TUNED.select(major, bytes=x.numel() * x.element_size())
    half = common.half_block(dim)
    vector = common.VECTOR_BYTES // x.element_size()
    cut = common.cut(config, rotary_kernel, major, tokens, heads, 2 * half, vector)
    return Launch.make(
        rotary_kernel,
        (tokens // cut.tokens * cut.parts, batch),
        x,
        x,
        cos,
        sin,
        OUT_JUMP=common.jump(batch, tokens, *out_strides[:2]),
        OUT_TOKEN_STRIDE=out_strides[1],
        OUT_HEAD_STRIDE=out_strides[2],
        X_JUMP=common.jump(batch, tokens, *x_strides[:2]),
        X_TOKEN_STRIDE=x_strides[1],
        X_HEAD_STRIDE=x_strides[2],
        COS_TOKEN_STRIDE=cos.stride(0),
        COS_PAIR_STRIDE=cos.stride(1) * call.step,
        SIN_TOKEN_STRIDE=sin.stride(0),
        SIN_PAIR_STRIDE=sin.stride(1) * call.step,
        ALL_HEADS=heads,
        DIM=dim,
        HALF=half,
        HEADS=cut.heads,
        TILES=cut.tiles,
        TOKENS=cut.tokens,
        PARTS=cut.parts,
        PDL=cut.pdl,
        STORE=config.store,
        num_warps=cut.warps,
        launch_pdl=cut.pdl,
    )


def launches(_op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = Call(**inputs, **scalars)
    _check(call)
    return [] if _uncovered(call) else [plan(call)]


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(OP)
    x, cos, sin = call[:3]
    check_tensors(OP, {"x": x, "cos": cos, "sin": sin})
    expect(x.dim() in (3, 4), "x", "[tokens, heads, head size] or [batch, ...]", list(x.shape))
    tokens, _, dim = x.shape[-3:]
    expect(dim > 0 and dim % 2 == 0, "x", "an even head size", dim)
    expect(cos.dim() == 2, "cos", "two dimensions [tokens, columns]", list(cos.shape))
    expect(cos.shape[0] >= tokens, "cos", f"at least {tokens} rows, one per token", cos.shape[0])
    expect(cos.shape[1] >= dim // 2, "cos", f"at least {dim // 2} columns, one per pair", cos.shape[1])
    expect(sin.shape == cos.shape, "sin", f"shape {list(cos.shape)}, as cos", list(sin.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    return common.uncovered(call.tensors, batch=(1, *call.x.shape)[-4], head=call.x.shape[-1])


def why_not(_op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = Call(*args, **kwargs)
    _check(call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, rotary_kernel) or _uncovered(call)


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x = call.x
    tokens, _, dim = x.shape[-3:]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (
        table[:tokens, :: call.step][:, None, : dim // 2].to(wide) for table in (call.cos, call.sin)
    )  # [tokens, 1, dim / 2]
    a, b = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
    y = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.empty_like(x).copy_(y)


_PLANS = Plans()


def _run(call: Call) -> torch.Tensor:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    tensors, scalars = call[:3], call[3:]
    y = _PLANS.recall(tensors, scalars)
    if y is MISS:
        _check(call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        y = _PLANS.launch(plan(call), tensors, scalars, outputs=[0])
    assert isinstance(y, torch.Tensor)
    return y


# --- custom op and fake: what torch.compile and other tracers see


def _impl(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _run(Call(*args, **kwargs))


def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A tensor like x."""
    return torch.empty_like(x)


_SCHEMA = "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor"
_op = register(__name__, OP, _SCHEMA, _impl, _fake)


# --- public function


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

    Other dtypes than float16, bfloat16 and float32, other strides, and CPU tensors, take a plain PyTorch path:
    see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _PLANS.hot:
            result = entry(x, cos, sin, interleaved)
            if result is not MISS:
                return result
    call = Call(x, cos, sin, interleaved)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _op(*call)
    return _run(call)
