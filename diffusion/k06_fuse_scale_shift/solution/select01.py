"""LayerNorm, then a scale, a shift and a gate chosen per token: one Triton kernel for both ops, launched directly.

    r = residual + residual_gate * x                                  (without a residual: r = x)
    n = (r - mean(r)) / sqrt(mean((r - mean(r))^2) + eps) * weight + bias              per token, over the channels
    y = n * (1 + scale_i) + shift_i,   gate_i                         i = 1 where index is not 0, else 0, per token

All in float32, each output rounded to x's dtype once. y, r and the chosen gates are new tensors of x's shape.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/scale_shift.py` (Apache-2.0); the code is our
own.

Idea: a row of x is read once and stays in registers through both passes over it (mean, then centred squares; never
E[r^2] - E[r]^2). It is cut into tiles of one 16-byte vector per thread, whose number need not be a power of two: 3072
channels are 3 tiles of 1024, where one block of 4096 would leave a quarter of the threads idle. The modulation rows are
few and stay in the caches; a token's index chooses between their addresses, so that 3 of them are loaded and not 6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.calls import capability, check_tensors, elsewhere, given, pdl_works, register, scattered, unfit
from kda_core.errors import expecting
from kda_core.launch import MISS, Launch, Plans, is_tracing
from kda_core.rows import affine, load_chunk, statistics, store_chunk, vector_width, widen
from kda_core.tuning import Table

OPS = (
    "fuse_layernorm_scale_shift_gate_select01_kernel",
    "fuse_residual_layernorm_scale_shift_gate_select01_kernel",
)
"""Without and with a residual."""
MODULATION = ("scale0", "shift0", "gate0", "scale1", "shift1", "gate1")
MOST_BYTES = 65536
"""Of a row of x: upstream's envelope."""
MOST_PER_THREAD = 32
"""Elements of a row that a thread holds, in float32, before the row gets more warps; with several rows a program up to
three times as many."""
MOST_WARPS = 16


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many channels as the threads of a row hold in one 16-byte vector of x each."""

    warps: int
    rows: int = 1
    """Rows of a program, with warps / rows warps each; equal to `warps`, a row stays within one warp."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = True
    """Scale, shift and gate are loaded before the statistics instead of behind them."""


TUNED = Table(__file__, "select01", Config)
"""Features: `elements` (of x)."""


# --- kernel


@triton.jit
def load_three(scale, shift, gate, lane, inside, tile: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr):
    """A tile of the chosen scale, shift and gate rows: [ROWS, COLS] each, as they are stored."""
    return (
        load_chunk(scale, lane, inside, tile, C, COLS, ""),
        load_chunk(shift, lane, inside, tile, C, COLS, ""),
        load_chunk(gate, lane, inside, tile, C, COLS, ""),
    )


@triton.jit
def select01_kernel(
    y,  # [B * L, C]
    residual_out,  # [B * L, C]
    gate_out,  # [B * L, C]
    x,  # [B * L, C]
    residual,  # [B * L, C], None without a residual, as are residual_gate and residual_out
    residual_gate,  # [B * L, C]
    weight,  # [C] or None
    bias,  # [C] or None
    scale0,  # [B, C], like the five that follow
    shift0,
    gate0,
    scale1,
    shift1,
    gate1,
    index,  # [B * L]
    rows,  # B * L, None where the programs' rows divide it
    tokens,  # L, None where B is 1
    SCALE0_STRIDE: tl.constexpr,
    SHIFT0_STRIDE: tl.constexpr,
    GATE0_STRIDE: tl.constexpr,
    SCALE1_STRIDE: tl.constexpr,
    SHIFT1_STRIDE: tl.constexpr,
    GATE1_STRIDE: tl.constexpr,
    INDEX_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # channels of a tile
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows of x."""
    TILES: tl.constexpr = (C + COLS - 1) // COLS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    lane = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = None if rows is None else row < rows
    batch = tl.zeros([1, 1], tl.int64)
    if tokens is not None:
        batch = (row // tokens).to(tl.int64)
    first = row.to(tl.int64) * C  # [ROWS, 1]

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # The index first: three loads wait for it. Then all tiles of x, so that they are in flight together.
    index += row.to(tl.int64) * INDEX_STRIDE
    chosen = (tl.load(index) if rows is None else tl.load(index, mask=inside, other=0)) != 0  # [ROWS, 1]
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (load_chunk(x + first, lane, inside, tile, C, COLS, ""),)
        if residual is not None:
            loaded += (load_chunk(residual + first, lane, inside, tile, C, COLS, ""),)
            loaded += (load_chunk(residual_gate + first, lane, inside, tile, C, COLS, ""),)

    scale_row = tl.where(chosen, scale1 + batch * SCALE1_STRIDE, scale0 + batch * SCALE0_STRIDE)  # [ROWS, 1]
    shift_row = tl.where(chosen, shift1 + batch * SHIFT1_STRIDE, shift0 + batch * SHIFT0_STRIDE)
    gate_row = tl.where(chosen, gate1 + batch * GATE1_STRIDE, gate0 + batch * GATE0_STRIDE)
    modulation = ()
    if EARLY:
        for tile in tl.static_range(TILES):
            modulation += (load_three(scale_row, shift_row, gate_row, lane, inside, tile, C, COLS),)

    values = ()
    for tile in tl.static_range(TILES):
        if residual is not None:
            gated = widen(loaded[3 * tile + 2]) * widen(loaded[3 * tile])
            value = widen(loaded[3 * tile + 1]) + gated
            store_chunk(residual_out + first, value, lane, inside, tile, C, COLS, STORE)
        else:
            value = widen(loaded[tile])
        values += (value,)
    mean, inverse = statistics(values, lane, EPS, C, COLS, False, y.dtype.element_ty == tl.float32)

    for tile in tl.static_range(TILES):
        normed = affine((values[tile] - mean) * inverse, weight, bias, lane, tile, C, COLS)
        three = modulation[tile] if EARLY else load_three(scale_row, shift_row, gate_row, lane, inside, tile, C, COLS)
        scale, shift, gate = three
        result = normed * (1.0 + widen(scale)) + widen(shift)
        store_chunk(y + first, result, lane, inside, tile, C, COLS, STORE)
        store_chunk(gate_out + first, gate, lane, inside, tile, C, COLS, STORE)


# --- launcher


class Call(NamedTuple):
    """The arguments of one call of either op, in the order of the one with a residual."""

    x: torch.Tensor
    residual: torch.Tensor | None
    residual_gate: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale0: torch.Tensor
    shift0: torch.Tensor
    gate0: torch.Tensor
    scale1: torch.Tensor
    shift1: torch.Tensor
    gate1: torch.Tensor
    index: torch.Tensor
    eps: float
    tensors = property(given)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, index = call.x, call.index
    batch, tokens, channels = x.shape
    major = capability(x)
    config = TUNED.select(major, elements=x.numel())
    warps, rows, cols = block(config, channels, x.element_size())
    pdl = config.pdl and pdl_works(select01_kernel, major)
    strides = {f"{name.upper()}_STRIDE": getattr(call, name).stride(0) if batch > 1 else 0 for name in MODULATION}
    return Launch.make(
        select01_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        None if call.residual is None else x,
        x,
        *call[:-1],
        batch * tokens if batch * tokens % rows else None,
        tokens if batch > 1 else None,
        **strides,
        INDEX_STRIDE=_index_stride(index),
        EPS=float(call.eps),
        C=channels,
        ROWS=rows,
        COLS=cols,
        # Modulation in registers beside a long row would spill.
        EARLY=config.early and (rows > 1 or channels * x.element_size() <= 2 * MOST_PER_THREAD * 32 * warps),
        PDL=pdl,
        STORE=config.store,
        num_warps=warps,
        launch_pdl=pdl,
    )


def block(config: Config, channels: int, item_size: int) -> tuple[int, int, int]:
    """Warps and rows of a program, and channels of a tile."""
    lanes = vector_width(1, item_size)
    # A short row does not fill the warps, a long one would not fit the registers of few.
    warps = min(config.warps, triton.next_power_of_2(triton.cdiv(channels * config.rows, lanes)))
    rows = config.rows if channels * config.rows <= 3 * MOST_PER_THREAD * 32 * warps else 1
    while rows == 1 and warps < MOST_WARPS and channels > MOST_PER_THREAD * 32 * warps:
        warps *= 2
    return warps, rows, min(max(warps // rows, 1) * lanes, triton.next_power_of_2(channels))


def _index_stride(index: torch.Tensor) -> int | None:
    """Elements of index from a row of x to the next, None where batches and tokens are not evenly spaced."""
    batch, tokens = index.shape
    by_batch, by_token = index.stride()
    if tokens == 1:
        return by_batch if batch > 1 else 0
    return by_token if batch == 1 or by_batch == tokens * by_token else None


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(op, **inputs, **scalars)
    _check(op, call)
    return [] if _uncovered(call) else [plan(call)]


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    """The call of `op` with these arguments; weight and bias may be left out."""
    names = [name for name in Call._fields if op == OPS[1] or not name.startswith("residual")]
    named = dict(zip(names, args, strict=False)) | kwargs
    return Call(**dict.fromkeys(("residual", "residual_gate", "weight", "bias")) | named)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(op: str, call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(op)
    optional = ("weight", "bias") if op == OPS[1] else ("residual", "residual_gate", "weight", "bias")
    check_tensors(op, dict(zip(call._fields[:-1], call[:-1], strict=True)), optional, integers=("index",))
    x = call.x
    expect(x.dim() == 3, "x", "three dimensions [B, L, C]", list(x.shape))
    batch, tokens, channels = x.shape
    shapes = dict.fromkeys(MODULATION, (batch, channels))
    shapes |= {"x": (batch, tokens, channels), "index": (batch, tokens), "weight": (channels,), "bias": (channels,)}
    for name, tensor in call.tensors.items():
        shape = shapes.get(name, shapes["x"])
        expect(tensor.shape == shape, name, f"shape {list(shape)}", list(tensor.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.x.shape[2] * call.x.element_size() > MOST_BYTES:
        return f"x has {call.x.shape[2]} channels; the kernel takes rows of up to {MOST_BYTES} bytes"
    for name, tensor in call.tensors.items():
        if name in ("x", "residual", "residual_gate") and not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
    for zero, one in zip(MODULATION[:3], MODULATION[3:], strict=True):
        if getattr(call, zero).dtype != getattr(call, one).dtype:
            return f"{one} has dtype {getattr(call, one).dtype}, {zero} another; the kernel chooses between addresses"
    if _index_stride(call.index) is None:
        return f"index has strides {call.index.stride()}; the kernel steps evenly from row to row"
    vectors = {name: tensor for name, tensor in call.tensors.items() if name != "index"}
    return unfit(call.tensors) or scattered(vectors)


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = _call(op, *args, **kwargs)
    _check(op, call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, select01_kernel) or _uncovered(call)


def _plain(call: Call) -> tuple[torch.Tensor, ...]:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x = call.x
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if call.residual is not None and call.residual_gate is not None:
        value = call.residual.to(wide) + call.residual_gate.to(wide) * value
    normed = value - value.mean(dim=-1, keepdim=True)
    normed = normed * torch.rsqrt(normed.square().mean(dim=-1, keepdim=True) + call.eps)
    if call.weight is not None:
        normed = normed * call.weight.to(wide)
    if call.bias is not None:
        normed = normed + call.bias.to(wide)

    def choose(zero: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return torch.where((call.index != 0)[..., None], one[:, None], zero[:, None])  # [B, L, C]

    scale, shift = choose(call.scale0, call.scale1), choose(call.shift0, call.shift1)
    y = normed * (1.0 + scale.to(wide)) + shift.to(wide)
    gate = choose(call.gate0, call.gate1)
    outputs = (y, gate) if call.residual is None else (y, value, gate)
    return tuple([output.to(x.dtype).contiguous() for output in outputs])


_PLANS = {op: Plans() for op in OPS}
_PLAIN_PLANS, _RESIDUAL_PLANS = _PLANS.values()


def _run(op: str, call: Call) -> tuple[torch.Tensor, ...]:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    tensors, scalars = call[:-1], call[-1:]
    made = _PLANS[op].recall(tensors, scalars)
    if made is MISS:
        _check(op, call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        outputs = [0, 0] if op == OPS[0] else [0, 0, 0]  # like x
        made = _PLANS[op].launch(plan(call), tensors, scalars, outputs)
    assert isinstance(made, tuple)
    return made


# --- custom ops and fakes: what torch.compile and other tracers see


def _impl(op: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return _run(op, _call(op, *args, **kwargs))


def _fakes(count: int, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, ...]:
    """So many tensors of x's shape, dtype and device, contiguous."""
    return tuple([torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)])


_PAIR = "Tensor residual, Tensor residual_gate, "
_REST = (
    "Tensor? weight, Tensor? bias, Tensor scale0, Tensor shift0, Tensor gate0, "
    "Tensor scale1, Tensor shift1, Tensor gate1, Tensor index, float eps"
)
_op = register(__name__, OPS[0], f"(Tensor x, {_REST}) -> (Tensor, Tensor)", partial(_impl, OPS[0]), partial(_fakes, 2))
_residual_op = register(
    __name__,
    OPS[1],
    f"(Tensor x, {_PAIR}{_REST}) -> (Tensor, Tensor, Tensor)",
    partial(_impl, OPS[1]),
    partial(_fakes, 3),
)


# --- public functions


def fuse_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm x, then scale and shift it by the rows that each token chooses.

    Args:
        x: [B, L, C], contiguous; float16, bfloat16 or float32; at most 65536 bytes a row.
        weight: [C] or None.
        bias: [C] or None.
        scale0: [B, C], chosen where index is 0; this and the next five may have any stride between their rows.
        shift0: [B, C].
        gate0: [B, C].
        scale1: [B, C], chosen where index is not 0.
        shift1: [B, C].
        gate1: [B, C].
        index: [B, L], integers or bool.
        eps: added to the variance.

    Returns:
        y and the chosen gates, [B, L, C] each, contiguous, x's dtype.

    Other dtypes, strides and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _PLAIN_PLANS.hot:
            result = entry(x, None, None, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps)
            if result is not MISS:
                return result
    call = Call(x, None, None, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _op(x, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps)
    return _run(OPS[0], call)


def fuse_residual_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    residual: torch.Tensor,
    residual_gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of residual + residual_gate * x.

    Args:
        x: as above.
        residual: [B, L, C], contiguous.
        residual_gate: [B, L, C], contiguous.
        weight: as above, like all that follow.
        bias: -
        scale0: -
        shift0: -
        gate0: -
        scale1: -
        shift1: -
        gate1: -
        index: -
        eps: -

    Returns:
        y, residual + residual_gate * x, and the chosen gates, [B, L, C] each, contiguous, x's dtype.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _RESIDUAL_PLANS.hot:
            result = entry(
                x, residual, residual_gate, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps
            )
            if result is not MISS:
                return result
    call = Call(x, residual, residual_gate, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _residual_op(*call)
    return _run(OPS[1], call)
