"""LTX2's rotary embedding of split halves, each head with its own angles: one Triton kernel, launched directly.

    y_p = bf16(x_p * cos_p) - x_p+h * sin_p,   y_p+h = bf16(x_p+h * cos_p) + x_p * sin_p       per token and head

for 0 <= p < h, half the head size. The product with cos is rounded to bfloat16 (through the dtype of x * cos), whatever
x's dtype is; the product with sin and the sum are float32, and the result is rounded once to x's dtype. That order is
part of the op's contract, because models were trained and compared with it.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/ltx2_rotary.py` (Apache-2.0); the code is our
own.

Idea: the op only streams, a head's angles are as many bytes as the head. A thread loads 16 bytes of each of x's halves,
of cos and of sin, and stores two vectors: all operands have one layout, so nothing moves between threads. A program
takes as many heads of a token as fit, all its loads before the first use. (0.5.12 gives each head a warp and each lane
one or two elements, 0.5.23 16 heads a program.)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.calls import capability, check_tensors, elsewhere, given, output_strides, register, scattered
from kda_core.errors import expecting
from kda_core.launch import MISS, Launch, Plans, is_tracing
from kda_core.tuning import Table

from . import common
from .common import Config

OP = "apply_ltx2_split_rotary_emb"


# --- configuration and selection


TUNED = Table(__file__, "ltx2_rotary", Config)
"""Features: `bytes` (of x)."""


# --- kernel


@triton.jit
def first_product(x, cos):
    """The product in its own dtype (the wider of the two), rounded to bfloat16, as float32."""
    if x.dtype == tl.bfloat16 and cos.dtype == tl.bfloat16:
        # Exact in float32, so this is one rounding, as a bfloat16 multiplication is.
        product = x.to(tl.float32) * cos.to(tl.float32)
    else:
        product = (x * cos).to(tl.float32)
    return product.to(tl.bfloat16).to(tl.float32)


@triton.jit
def ltx2_rotary_kernel(
    out,  # [BATCH, TOKENS, ALL_HEADS * 2 * HALF_DIM]
    x,  # [BATCH, TOKENS, ALL_HEADS * 2 * HALF_DIM]
    cos,  # [BATCH, ALL_HEADS, TOKENS, HALF_DIM]
    sin,
    # Strides are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    OUT_JUMP: tl.constexpr,  # batch stride beyond TOKENS token strides
    OUT_TOKEN_STRIDE: tl.constexpr,
    X_JUMP: tl.constexpr,
    X_TOKEN_STRIDE: tl.constexpr,
    COS_JUMP: tl.constexpr,
    COS_TOKEN_STRIDE: tl.constexpr,
    COS_HEAD_STRIDE: tl.constexpr,
    SIN_JUMP: tl.constexpr,
    SIN_TOKEN_STRIDE: tl.constexpr,
    SIN_HEAD_STRIDE: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,  # HALF_DIM, padded to a power of two
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
    row_of_all = batch * (tl.num_programs(0) // PARTS).to(tl.int64) * TOKENS + token
    first = tl.program_id(0) % PARTS * (HEADS * TILES)
    x += row_of_all * X_TOKEN_STRIDE + batch * X_JUMP
    out += row_of_all * OUT_TOKEN_STRIDE + batch * OUT_JUMP
    cos += row_of_all * COS_TOKEN_STRIDE + batch * COS_JUMP
    sin += row_of_all * SIN_TOKEN_STRIDE + batch * SIN_JUMP
    # 64 bits: heads of a [batch, heads, tokens, half] table may be far apart.
    row = tl.arange(0, HEADS)[:, None].to(tl.int64)  # [HEADS, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads of all tiles first: a thread keeps four vectors of each in flight.
    loaded = ()
    for step in tl.static_range(TOKENS * TILES):
        head = first + step % TILES * HEADS + row  # [HEADS, 1]
        inside = head < ALL_HEADS
        if HALF != HALF_DIM:
            inside = inside & (pair < HALF_DIM)
        at_x = x + step // TILES * X_TOKEN_STRIDE + head * (2 * HALF_DIM) + pair
        at_cos = cos + step // TILES * COS_TOKEN_STRIDE + head * COS_HEAD_STRIDE + pair
        at_sin = sin + step // TILES * SIN_TOKEN_STRIDE + head * SIN_HEAD_STRIDE + pair
        loaded += (
            tl.load(at_x, mask=inside, other=0.0),
            tl.load(at_x + HALF_DIM, mask=inside, other=0.0),
            tl.load(at_cos, mask=inside, other=0.0),
            tl.load(at_sin, mask=inside, other=0.0),
        )

    for step in tl.static_range(TOKENS * TILES):
        a, b, c = loaded[4 * step], loaded[4 * step + 1], loaded[4 * step + 2]  # [HEADS, HALF]
        s = loaded[4 * step + 3].to(tl.float32)
        y_a = tl.fma(-b.to(tl.float32), s, first_product(a, c))
        y_b = tl.fma(a.to(tl.float32), s, first_product(b, c))

        head = first + step % TILES * HEADS + row
        inside = head < ALL_HEADS
        if HALF != HALF_DIM:
            inside = inside & (pair < HALF_DIM)
        at = out + step // TILES * OUT_TOKEN_STRIDE + head * (2 * HALF_DIM) + pair
        tl.store(at, y_a.to(out.dtype.element_ty), mask=inside, cache_modifier=STORE)
        tl.store(at + HALF_DIM, y_b.to(out.dtype.element_ty), mask=inside, cache_modifier=STORE)


# --- launcher


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    tensors = property(given)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, cos, sin = call
    batch, heads, tokens, half_dim = cos.shape
    out_strides = output_strides(x)
    major = capability(x)
    config = TUNED.select(major, bytes=x.numel() * x.element_size())
    half = common.half_block(2 * half_dim)
    vector = common.VECTOR_BYTES // x.element_size()
    cut = common.cut(config, ltx2_rotary_kernel, major, tokens, heads, half, vector)
    return Launch.make(
        ltx2_rotary_kernel,
        (tokens // cut.tokens * cut.parts, batch),
        x,
        x,
        cos,
        sin,
        OUT_JUMP=common.jump(batch, tokens, out_strides[0], out_strides[1]),
        OUT_TOKEN_STRIDE=out_strides[1],
        X_JUMP=common.jump(batch, tokens, x.stride(0), x.stride(1)),
        X_TOKEN_STRIDE=x.stride(1),
        COS_JUMP=common.jump(batch, tokens, cos.stride(0), cos.stride(2)),
        COS_TOKEN_STRIDE=cos.stride(2),
        COS_HEAD_STRIDE=cos.stride(1),
        SIN_JUMP=common.jump(batch, tokens, sin.stride(0), sin.stride(2)),
        SIN_TOKEN_STRIDE=sin.stride(2),
        SIN_HEAD_STRIDE=sin.stride(1),
        ALL_HEADS=heads,
        HALF_DIM=half_dim,
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
    x, cos, sin = call
    check_tensors(OP, call._asdict())
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
    reason = common.uncovered(call.tensors, batch=cos.shape[0], head=2 * cos.shape[3])
    return reason or scattered({"cos": cos, "sin": sin})


def why_not(_op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = Call(*args, **kwargs)
    _check(call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, ltx2_rotary_kernel) or _uncovered(call)


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x, cos, sin = call
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.unflatten(-1, (cos.shape[1], 2, cos.shape[3])).unbind(-2)  # [batch, tokens, heads, half]
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2).to(wide)
    y_a = (a * cos).to(torch.bfloat16).to(wide) - b.to(wide) * sin
    y_b = (b * cos).to(torch.bfloat16).to(wide) + a.to(wide) * sin
    return torch.empty_like(x).copy_(torch.stack((y_a, y_b), dim=-2).flatten(-3))


_PLANS = Plans()


def _run(call: Call) -> torch.Tensor:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    y = _PLANS.recall(call, ())
    if y is MISS:
        _check(call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        y = _PLANS.launch(plan(call), call, (), outputs=[0])
    assert isinstance(y, torch.Tensor)
    return y


# --- custom op and fake: what torch.compile and other tracers see


def _impl(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _run(Call(*args, **kwargs))


def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A tensor like x."""
    return torch.empty_like(x)


_SCHEMA = "(Tensor x, Tensor cos, Tensor sin) -> Tensor"
_op = register(__name__, OP, _SCHEMA, _impl, _fake)


# --- public function


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
    if not is_dynamo_compiling():
        for entry in _PLANS.hot:
            result = entry(x, cos, sin)
            if result is not MISS:
                return result
    call = Call(x, cos, sin)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _op(*call)
    return _run(call)
