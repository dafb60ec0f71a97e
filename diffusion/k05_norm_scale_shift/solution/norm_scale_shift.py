"""Norm, scale and shift, of x or of a gated residual: one Triton kernel for both ops, launched directly.

    r = residual + gate * x                                 rounded to x's dtype, returned; without a residual: r = x
    y = norm(r) * (1 + scale) + shift                                               per token, over the D columns
    norm(r) = r / sqrt(mean(r^2) + eps) * weight                                    "rms"
    norm(r) = (r - mean(r)) / sqrt(mean((r - mean(r))^2) + eps) * weight + bias     "layer"

All in float32, each output rounded to x's dtype once. y and r are new tensors like x. gate may be None (1), weight and
bias may be left out; as in upstream, RMSNorm ignores a bias, and LayerNorm ignores weight or bias if only one of them
is given.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/cutedsl/scale_residual_norm_scale_shift.py`
(Apache-2.0); the code is our own.

Idea: the op only streams. A row of x is read once and stays in registers. So does r, rounded to x's dtype as it is
stored: y is then the norm of the r that the caller gets, and a 16-bit row takes half the registers. Rows are cut into
chunks of one 16-byte vector a thread: 5120 columns are 5 chunks of 1024. Operands of every broadcast form are read in
place (`kda_runtime.broadcast`); what all rows of a program share is loaded once.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime import norm_rows
from kda_runtime.checks import capability, pdl_works
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    follow_the_kernel_ahead,
    load_operand_chunk,
    load_operand_row,
    load_row,
    norm_chunk,
    operand_line,
    statistics,
    store_chunk,
    vector_width,
    widen,
)
from kda_runtime.tuned_table import Table

OPERANDS = ("gate", "scale", "shift")
MOST_PER_THREAD = 40
"""Elements of a row that a thread holds before the row gets more warps: 5120 columns at 4 warps."""
MOST_BYTES_OF_ROWS = 160
"""Bytes of x that a thread may hold: at 4 warps two rows of 5120 16-bit columns, or one row of float32."""
MOST_BYTES_HELD = 320
"""Bytes that a thread may load before the statistics if it loads nothing after them; its registers hold 1020."""
MOST_BYTES_AHEAD = 256
"""The same if it loads more after the statistics; at least one chunk of every operand is loaded before them."""
ALL = 16
"""All chunks of a row: no row of the envelope has more than this."""
MOST_WARPS = 16


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    rows: int = 1
    """Rows of a program, which share what is loaded of weight, bias and one-line operands."""
    whole: bool = True
    """Fewer warps, down to a quarter, where that cuts a row into whole chunks, so that no thread idles in the last."""
    ahead: int = ALL
    """Chunks of weight, bias, scale and shift that are loaded before the statistics. After these, each further chunk is
    loaded this many chunks before it is needed. 1 is the least, and takes the fewest registers."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x and residual, or `evict_first`."""
    store: str = ""
    """Cache modifier of the stores."""
    maxnreg: int = 0
    """Limit on a thread's registers, applied if that many hold the loaded data (`norm_rows.register_limit`); 0 leaves
    the number to the compiler."""


TUNED = Table(__file__, "norm_scale_shift", Config)
"""Tuned configurations, chosen by `bytes` (of x), `width` (columns), `residual` (0 or 1) and `streamed` (bytes per
element of x of those of gate, scale and shift that differ from row to row)."""


# --- kernel


@triton.jit
def load_next(chunks, line, col, inside, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """The loaded chunks of an operand and one more; an operand of one value for all columns repeats its first chunk."""
    if len(chunks) > 0:  # the operand takes part
        if FORM.across:
            chunks += (load_operand_chunk(line, col, inside, chunk, N, BLOCK, FORM),)
        else:
            chunks += (chunks[0],)
    return chunks


@triton.jit(do_not_specialize=["rows"])
def norm_scale_shift_kernel(
    y,  # [B * S, D]
    residual_out,  # [B * S, D], None without a residual, as are residual and gate
    residual,  # [B * S, D]
    x,  # [B * S, D]
    gate,  # or None
    weight,  # [D] or None, like bias
    bias,
    scale,
    shift,
    rows,  # B * S, None where the programs' rows divide it
    gate_group,  # None where the form needs none
    scale_group,
    shift_group,
    # The `Form` of each tensor, None where it takes no part. Forms and eps are fixed per model: as constants they cost
    # the host nothing at launch (20 ns an argument).
    RESIDUAL: tl.constexpr,
    X: tl.constexpr,
    GATE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # chunks of weight, bias, scale and shift that are loaded before they are needed
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows of x, each in ceil(N / BLOCK) chunks."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    FIRST: tl.constexpr = min(AHEAD * BLOCK, N)  # columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = None if rows is None else row < rows
    first = row.to(tl.int64) * N  # [ROWS, 1], of the outputs
    scale_line = operand_line(scale, row, scale_group, SCALE)
    shift_line = operand_line(shift, row, shift_group, SHIFT)

    follow_the_kernel_ahead(PDL)

    # Loads of all chunks first: a thread keeps them in flight.
    values = load_row(operand_line(x, row, None, X), col, inside, N, BLOCK, LOAD)
    if residual is not None:
        residuals = load_row(operand_line(residual, row, None, RESIDUAL), col, inside, N, BLOCK, LOAD)
        gate_line = None if gate is None else operand_line(gate, row, gate_group, GATE)
        gates = load_operand_row(gate_line, col, inside, N, BLOCK, GATE)
    # Then the first chunks of the other operands.
    scales = load_operand_row(scale_line, col, inside, FIRST, BLOCK, SCALE)
    shifts = load_operand_row(shift_line, col, inside, FIRST, BLOCK, SHIFT)
    weights = load_operand_row(None if WEIGHT is None else weight, col, inside, FIRST, BLOCK, WEIGHT)
    biases = load_operand_row(None if BIAS is None else bias, col, inside, FIRST, BLOCK, BIAS)

    if residual is not None:
        sum_line = residual_out + first
        sums = ()  # rounded, as they are stored
        for chunk in tl.static_range(CHUNKS):
            if gate is None:
                # Not `widen`: without it the compiler adds pairs in bfloat16, one instruction with the same result.
                value = values[chunk].to(tl.float32) + residuals[chunk].to(tl.float32)
            else:
                value = tl.fma(widen(gates[chunk]), widen(values[chunk]), widen(residuals[chunk]))
            value = value.to(y.dtype.element_ty)
            sums += (value.to(tl.float32) if gate is None else widen(value),)
            store_chunk(sum_line, value, col, inside, chunk, N, BLOCK, STORE)
        values = sums
    # A mean of values around 64 is off by 1e-5, which only float32 outputs show: exact there.
    mean, inverse = statistics(values, col, EPS, N, BLOCK, RMS, y.dtype.element_ty == tl.float32)  # [ROWS, 1]

    for chunk in tl.static_range(CHUNKS):
        if chunk + AHEAD < CHUNKS:
            scales = load_next(scales, scale_line, col, inside, chunk + AHEAD, N, BLOCK, SCALE)
            shifts = load_next(shifts, shift_line, col, inside, chunk + AHEAD, N, BLOCK, SHIFT)
            weights = load_next(weights, weight, col, inside, chunk + AHEAD, N, BLOCK, WEIGHT)
            biases = load_next(biases, bias, col, inside, chunk + AHEAD, N, BLOCK, BIAS)
        value = norm_chunk(values, chunk, mean, inverse, weights, biases)
        value = value * (1.0 + widen(scales[chunk])) + widen(shifts[chunk])
        store_chunk(y + first, value, col, inside, chunk, N, BLOCK, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of either op, in the order of the one with a residual."""

    residual: torch.Tensor | None
    x: torch.Tensor
    gate: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor
    shift: torch.Tensor
    norm_type: str
    eps: float


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    places = norm_rows.places(call)
    sizes = norm_rows.column_bytes(call, places, rows=1)
    streamed = sum(sizes[name] for name in OPERANDS if name in sizes and places[name].form.name in ("rows", "cycle"))
    summed = call.residual is not None
    major = capability(x)
    config = TUNED.select(major, bytes=x.nbytes, width=columns, residual=int(summed), streamed=streamed)
    warps, rows, block = cut(config, columns, x.itemsize)
    sizes = norm_rows.column_bytes(call, places, rows)
    ahead, held = loads_ahead(sizes, config.ahead, columns, warps, block)
    pdl = config.pdl and pdl_works(norm_scale_shift_kernel, major)
    return Launch.make(
        norm_scale_shift_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        x if summed else None,
        *call[:-2],
        batch * tokens if batch * tokens % rows else None,
        *(places[name].group if name in places else None for name in OPERANDS),
        **{name.upper(): places[name].form if name in places else None for name in Call._fields[:-2]},
        EPS=float(call.eps),
        N=columns,
        RMS=call.norm_type == "rms",
        BLOCK=block,
        ROWS=rows,
        AHEAD=ahead,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=warps,
        launch_pdl=pdl,
        **norm_rows.register_limit(config.maxnreg, held),
    )


def cut(config: Config, columns: int, item_size: int) -> tuple[int, int, int]:
    """Warps and rows of a program, and columns of a chunk."""
    # Short rows do not fill the warps, long ones do not fit the registers of few.
    warps = min(config.warps, triton.next_power_of_2(triton.cdiv(columns, vector_width(1, item_size))))
    if config.whole:
        counts = [count for count in (warps, warps // 2, warps // 4) if columns <= MOST_PER_THREAD * 32 * count]
        warps = next((count for count in counts if columns % vector_width(count, item_size) == 0), warps)
    while warps < MOST_WARPS and columns > MOST_PER_THREAD * 32 * warps:
        warps *= 2
    rows = config.rows
    while rows > 1 and columns * rows * item_size > MOST_BYTES_OF_ROWS * 32 * warps:
        rows //= 2
    return warps, rows, min(vector_width(warps, item_size), triton.next_power_of_2(columns))


def loads_ahead(sizes: dict[str, int], wanted: int, columns: int, warps: int, block: int) -> tuple[int, int]:
    """Chunks of weight, bias, scale and shift that are loaded ahead, and the bytes that a thread holds with them.

    `sizes` are the bytes of one column that a program loads of each tensor.
    """
    # Bytes of a chunk per thread: `whole` of the tensors of which whole rows are loaded first, `each` of the rest.
    sizes = {name: size * block // (32 * warps) for name, size in sizes.items()}
    whole = sum(sizes.get(name, 0) for name in ("residual", "x", "gate"))
    each = sum(sizes.values()) - whole
    ahead = chunks = triton.cdiv(columns, block)
    if (whole + each) * chunks > MOST_BYTES_HELD:
        ahead = max((MOST_BYTES_AHEAD - whole * chunks) // max(each, 1), 1)
    ahead = min(ahead, wanted)
    return ahead, whole * chunks + each * ahead


# --- the path for what the kernel does not cover


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same maths in PyTorch."""
    x, used, operands = call.x, norm_rows.used(call), norm_rows.wide(call)
    if call.residual is not None:
        x = norm_rows.like(x, call.residual.float() + operands.get("gate", 1.0) * x.float())
    rms = call.norm_type == "rms"
    normed = norm_rows.plain_norm(x.float(), used.get("weight"), used.get("bias"), call.eps, rms)
    y = norm_rows.like(x, normed * (1.0 + operands["scale"]) + operands["shift"])
    return y if call.residual is None else (y, x)


# --- public functions

_op = partial(
    Op,
    arguments=Call,
    kernel=norm_scale_shift_kernel,
    plan=plan,
    plain=_plain,
    check=norm_rows.check,
    uncovered=norm_rows.uncovered,
)
SINGLE = _op("fused_norm_scale_shift", outputs=("x",))
WITH_RESIDUAL = _op("fused_scale_residual_norm_scale_shift", outputs=("x", "x"), required=("residual",))


@SINGLE.public
def fused_norm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Norm x, times 1 + scale, plus shift.

    Args:
        x: [B, S, D], float16, bfloat16 or float32; D a multiple of 256 up to 8192; rows may be apart from each other.
        weight: [D], or None for 1.
        bias: [D], or None for 0; only LayerNorm has one, and takes weight and bias together or neither.
        scale: [1], [D], [B, D], [B, S, D] or [B, F, 1, D] with F frames of S / F tokens; any size may be 1 instead.
        shift: likewise.
        norm_type: "layer" or "rms".
        eps: added to the variance or the mean square.

    Returns:
        A new tensor like x.

    CPU tensors, uneven strides and gradients take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return SINGLE.call(None, x, None, weight, bias, scale, shift, norm_type, eps)


@WITH_RESIDUAL.public
def fused_scale_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for r = residual + gate * x instead of x: r as it is returned, rounded to x's dtype.

    `residual` is [B, S, D] in any of the three dtypes; its rows may be apart from each other. `gate` is as `scale`, or
    None for 1. The others are as above, and so are errors.

    Returns:
        y and r, new tensors like x.
    """
    return WITH_RESIDUAL.call(residual, x, gate, weight, bias, scale, shift, norm_type, eps)
