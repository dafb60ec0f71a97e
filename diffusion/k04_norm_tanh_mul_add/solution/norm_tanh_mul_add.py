"""Norm, tanh gate and shift; one op adds a second norm and scale: one Triton kernel for both ops, launched directly.

    y = norm(x) * tanh(scale) + shift                                               per token, over the D columns
    y2 = norm(y) * (1 + scale2)                                                     of y rounded to x's dtype
    norm(x) = x / sqrt(mean(x^2) + eps) * weight                                    "rms"
    norm(x) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias     "layer"

All in float32, each output rounded to x's dtype once. y and y2 are new tensors like x. weight and bias may be left out;
as in upstream, RMSNorm ignores a bias, and LayerNorm ignores weight or bias if only one of the two is given.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/cutedsl/norm_tanh_mul_add_norm_scale.py`
(Apache-2.0); the code is our own.

Idea: a row of x is read once and stays in registers. y stays in registers until its own norm is done, rounded to x's
dtype as it is stored, so that y2 is the norm of the y that the caller gets. Rows are cut into chunks of one 16-byte
vector a thread. Operands of every broadcast form are read in place; what all rows of a program share is loaded once,
and its tanh computed once. shift, which is as large as x in production, is loaded together with x.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime import norm_rows
from kda_runtime.checks import capability, pdl_works
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    follow_the_kernel_ahead,
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

OPERANDS = ("scale", "shift", "scale2")
MOST_PER_THREAD = 32
"""Elements of a program's rows that a thread holds before the program gets more warps: more would spill."""
MOST_WARPS = 16
MOST_EARLY = 768
"""Bytes that a thread may load for both norms before the first statistics; its registers hold 1020."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    rows: int = 1
    """Rows of a program, which share what is loaded and computed of weight, bias and one-line operands."""
    early: int = 1
    """Norms whose parameters and operands are loaded before the first statistics: 0, 1, or 2 if registers hold it."""
    approximate: bool = True
    """bfloat16 outputs only: the tanh of the special function unit (relative error 2^-11, an eighth of bfloat16's own
    rounding; upstream rounds its tanh to bfloat16) instead of 22 instructions."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x."""
    store: str = ""
    """Cache modifier of the stores."""
    maxnreg: int = 0
    """Limit on a thread's registers, applied if the tanh is approximate and that many hold the loaded data
    (`norm_rows.register_limit`); 0 leaves the number to the compiler."""


TUNED = Table(__file__, "norm_tanh_mul_add", Config)
"""Tuned configurations, chosen by `outputs` (1 or 2), `width` (columns) and `bytes` (of x)."""


# --- kernel


@triton.jit
def tanh(value, APPROXIMATE: tl.constexpr):
    """The hyperbolic tangent of float32 values; not APPROXIMATE: to three units in the last place, also near 0."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        # 1 - e loses its digits where e is close to 1. There the series is used, cut where it is good to 1e-8.
        e = tl.exp(-2.0 * tl.abs(value))
        large = (1.0 - e) / (1.0 + e)
        square = value * value
        series = -17 / 315 + square * (62 / 2835)
        series = -1 / 3 + square * (2 / 15 + square * series)
        small = value + value * square * series
        return tl.where(square < 0.0625, small, tl.where(value < 0.0, -large, large))


@triton.jit
def load_parameters(weight, bias, col, WEIGHT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """All chunks of weight and of bias, [1, BLOCK] each; an empty tuple for one that takes no part."""
    weights = load_row(None if WEIGHT is None else weight, col, None, N, BLOCK, "")
    biases = load_row(None if BIAS is None else bias, col, None, N, BLOCK, "")
    return weights, biases


@triton.jit(do_not_specialize=["rows"])
def norm_tanh_mul_add_kernel(
    y,  # [B * S, D]
    y2,  # [B * S, D], None without the second norm, as are weight2, bias2 and scale2
    x,  # [B * S, D]
    weight,  # [D] or None, like bias, weight2 and bias2
    bias,
    scale,
    shift,
    weight2,
    bias2,
    scale2,
    rows,  # B * S, None where the programs' rows divide it
    scale_group,  # None where the form needs none
    shift_group,
    scale2_group,
    # The `Form` of each tensor, None where it takes no part. Forms and eps are fixed per model: as constants they cost
    # the host nothing at launch (20 ns an argument).
    X: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGHT2: tl.constexpr,
    BIAS2: tl.constexpr,
    SCALE2: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows of x, each in ceil(N / BLOCK) chunks."""
    # A mean of values around 64 is off by 1e-5, which only float32 outputs show.
    EXACT: tl.constexpr = y.dtype.element_ty == tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = None if rows is None else row < rows
    first = row.to(tl.int64) * N  # [ROWS, 1], of the outputs
    scale_line = operand_line(scale, row, scale_group, SCALE)
    shift_line = operand_line(shift, row, shift_group, SHIFT)
    scale2_line = None if y2 is None else operand_line(scale2, row, scale2_group, SCALE2)

    follow_the_kernel_ahead(PDL)

    # Loads of all chunks first: a thread keeps them in flight.
    values = load_row(operand_line(x, row, None, X), col, inside, N, BLOCK, LOAD)
    if EARLY > 0:
        shifts = load_operand_row(shift_line, col, inside, N, BLOCK, SHIFT)
        scales = load_operand_row(scale_line, col, inside, N, BLOCK, SCALE)
        weights, biases = load_parameters(weight, bias, col, WEIGHT, BIAS, N, BLOCK)
    if EARLY > 1:
        scales2 = load_operand_row(scale2_line, col, inside, N, BLOCK, SCALE2)
        weights2, biases2 = load_parameters(weight2, bias2, col, WEIGHT2, BIAS2, N, BLOCK)

    mean, inverse = statistics(values, col, EPS, N, BLOCK, RMS, EXACT)  # [ROWS, 1]
    if EARLY == 0:
        shifts = load_operand_row(shift_line, col, inside, N, BLOCK, SHIFT)
        scales = load_operand_row(scale_line, col, inside, N, BLOCK, SCALE)
        weights, biases = load_parameters(weight, bias, col, WEIGHT, BIAS, N, BLOCK)
    stored = ()
    for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
        gate = tanh(widen(scales[chunk]), APPROXIMATE)
        value = norm_chunk(values, chunk, mean, inverse, weights, biases) * gate + widen(shifts[chunk])
        value = value.to(y.dtype.element_ty)
        if y2 is not None and (chunk + 1) * BLOCK > N:
            value = tl.where(chunk * BLOCK + col < N, value, 0.0)
        store_chunk(y + first, value, col, inside, chunk, N, BLOCK, STORE)
        stored += (value,)

    if y2 is not None:
        if EARLY < 2:
            scales2 = load_operand_row(scale2_line, col, inside, N, BLOCK, SCALE2)
            weights2, biases2 = load_parameters(weight2, bias2, col, WEIGHT2, BIAS2, N, BLOCK)
        mean, inverse = statistics(stored, col, EPS, N, BLOCK, RMS, EXACT)
        for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
            value = norm_chunk(stored, chunk, mean, inverse, weights2, biases2) * (1.0 + widen(scales2[chunk]))
            store_chunk(y2 + first, value, col, inside, chunk, N, BLOCK, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of either op, in the order of the one with the second norm."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor
    shift: torch.Tensor
    weight2: torch.Tensor | None
    bias2: torch.Tensor | None
    scale2: torch.Tensor | None
    norm_type: str
    eps: float


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    places = norm_rows.places(call)
    double = call.scale2 is not None
    major = capability(x)
    config = TUNED.select(major, outputs=1 + double, width=columns, bytes=x.nbytes)
    warps, rows, block = cut(config, columns, x.itemsize)
    approximate = config.approximate and x.dtype == torch.bfloat16 and not is_interpreted(norm_tanh_mul_add_kernel)
    loaded = partial(held, norm_rows.column_bytes(call, places, rows), columns, warps, block)
    early = 2 if config.early == 2 and double and loaded(2) <= MOST_EARLY else min(config.early, 1)
    pdl = config.pdl and pdl_works(norm_tanh_mul_add_kernel, major)
    return Launch.make(
        norm_tanh_mul_add_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        x if double else None,
        *call[:-2],
        batch * tokens if batch * tokens % rows else None,
        *(places[name].group if name in places else None for name in OPERANDS),
        **{name.upper(): places[name].form if name in places else None for name in Call._fields[:-2]},
        EPS=float(call.eps),
        N=columns,
        RMS=call.norm_type == "rms",
        BLOCK=block,
        ROWS=rows,
        EARLY=early,
        APPROXIMATE=approximate,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=warps,
        launch_pdl=pdl,
        **(norm_rows.register_limit(config.maxnreg, loaded(early)) if approximate else {}),
    )


def cut(config: Config, columns: int, item_size: int) -> tuple[int, int, int]:
    """Warps and rows of a program, and columns of a chunk."""
    # Short rows do not fill the warps, long ones do not fit the registers of few.
    warps = min(config.warps, triton.next_power_of_2(triton.cdiv(columns, vector_width(1, item_size))))
    while warps < MOST_WARPS and columns * config.rows > MOST_PER_THREAD * 32 * warps:
        warps *= 2
    rows = config.rows
    while rows > 1 and columns * rows > MOST_PER_THREAD * 32 * warps:
        rows //= 2
    return warps, rows, min(vector_width(warps, item_size), triton.next_power_of_2(columns))


def held(sizes: dict[str, int], columns: int, warps: int, block: int, early: int) -> int:
    """Bytes that a thread loads of x and of the first norm's operands, and of the second's where they are early.

    `sizes` are the bytes of one column that a program loads of each tensor.
    """
    by_column = sum(size for name, size in sizes.items() if early == 2 or not name.endswith("2"))
    return by_column * triton.cdiv(columns, block) * block // (32 * warps)


# --- the path for what the kernel does not cover


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same maths in PyTorch."""
    x, used, operands = call.x, norm_rows.used(call), norm_rows.wide(call)

    def norm(value: torch.Tensor, number: str) -> torch.Tensor:
        weight, bias = used.get(f"weight{number}"), used.get(f"bias{number}")
        return norm_rows.plain_norm(value.float(), weight, bias, call.eps, rms=call.norm_type == "rms")

    y = norm_rows.like(x, norm(x, "") * torch.tanh(operands["scale"]) + operands["shift"])
    return y if call.scale2 is None else (y, norm_rows.like(x, norm(y, "2") * (1.0 + operands["scale2"])))


# --- public functions

_op = partial(
    Op,
    arguments=Call,
    kernel=norm_tanh_mul_add_kernel,
    plan=plan,
    plain=_plain,
    check=norm_rows.check,
    uncovered=norm_rows.uncovered,
)
SINGLE = _op("fused_norm_tanh_mul_add", outputs=("x",))
DOUBLE = _op("fused_norm_tanh_mul_add_norm_scale", outputs=("x", "x"), required=("scale2",))


@SINGLE.public
def fused_norm_tanh_mul_add(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Norm x, times the tanh of scale, plus shift.

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
    return SINGLE.call(x, weight, bias, scale, shift, None, None, None, norm_type, eps)


@DOUBLE.public
def fused_norm_tanh_mul_add_norm_scale(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight2: torch.Tensor | None,
    bias2: torch.Tensor | None,
    scale2: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The y of `fused_norm_tanh_mul_add`, and y2 = norm(y) * (1 + scale2) of y as it is returned, rounded.

    `weight2`, `bias2` and `scale2` are as `weight`, `bias` and `scale`; `norm_type` and `eps` are those of both norms.
    The others are as above, and so are errors.

    Returns:
        y and y2, new tensors like x.
    """
    return DOUBLE.call(x, weight, bias, scale, shift, weight2, bias2, scale2, norm_type, eps)
