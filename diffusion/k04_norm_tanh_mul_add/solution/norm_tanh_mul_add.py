"""Norm, tanh gate and shift, and a second norm and scale behind it: one Triton kernel for both ops, launched directly.

    y = norm(x) * tanh(scale) + shift                                               per token, over the D columns
    y2 = norm(y) * (1 + scale2)                                                     of y rounded to x's dtype
    norm(x) = x / sqrt(mean(x^2) + eps) * weight                                    "rms"
    norm(x) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias     "layer"

All in float32, each output rounded to x's dtype once. y and y2 are new tensors like x. weight and bias may be left out;
as upstream has it, RMSNorm takes no notice of a bias, and LayerNorm of one of the two without the other.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/cutedsl/norm_tanh_mul_add_norm_scale.py`
(Apache-2.0); the code is our own.

Idea: a row of x is read once and stays in registers, and so does y until its own norm is done: as it is stored, in x's
dtype, so that y2 is the norm of the y that the caller gets. Rows are cut into chunks of one 16-byte vector a thread.
Operands of every broadcast form are read where they lie (`kda_core.rows`); what all rows of a program share is loaded
once, and its tanh computed once. shift, which is as large as x in production, is in flight together with x.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.calls import (
    FLOATS,
    capability,
    check_tensors,
    elsewhere,
    given,
    output_strides,
    pdl_works,
    register,
    unfit,
)
from kda_core.errors import expecting
from kda_core.launch import MISS, Launch, Plans, is_interpreted, is_tracing
from kda_core.rows import (
    Form,
    check_operands,
    form,
    formless,
    load_operand_row,
    load_row,
    operand_line,
    per_token,
    row_stride,
    statistics,
    store_chunk,
    vector_width,
    widen,
)
from kda_core.tuning import Table

OPS = ("fused_norm_tanh_mul_add", "fused_norm_tanh_mul_add_norm_scale")
"""Without and with the second norm."""
NORMS = ("layer", "rms")
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""Upstream's envelope: the number of columns is a multiple of the one and at most the other."""
VECTORS = ("weight", "bias", "weight2", "bias2")
OPERANDS = ("scale", "shift", "scale2")
MOST_PER_THREAD = 32
"""Elements of its rows that a thread holds, before a row gets more warps: more of them would spill."""
MOST_WARPS = 16
ROOM = 128
"""Bytes of registers for all but what is loaded: with less, limits to the registers made variants spill."""
MOST_EARLY = 768
"""Bytes that a thread may load of both norms before the first statistics, of the 1020 of its registers."""


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
    """Registers that a thread has at most, where the tanh is approximate and they hold what is loaded and `ROOM`; 0
    leaves them to the compiler."""


TUNED = Table(__file__, "norm_tanh_mul_add", Config)
"""Features: `outputs` (1 or 2), `width` (columns) and `bytes` (of x)."""


# --- kernel


@triton.jit
def tanh(value, APPROXIMATE: tl.constexpr):
    """The hyperbolic tangent of float32 values; exact: to three units in the last place, also near 0."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        # 1 - e loses its digits where e is close to 1: there the series, cut where it is good to 1e-8.
        e = tl.exp(-2.0 * tl.abs(value))
        large = (1.0 - e) / (1.0 + e)
        square = value * value
        series = -17 / 315 + square * (62 / 2835)
        series = -1 / 3 + square * (2 / 15 + square * series)
        small = value + value * square * series
        return tl.where(square < 0.0625, small, tl.where(value < 0.0, -large, large))


@triton.jit
def load_parameters(weight, bias, col, WEIGHT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """All chunks of weight and of bias, [1, BLOCK] each; none of what takes no part."""
    weights = load_row(weight if WEIGHT else None, col, None, N, BLOCK, "")
    biases = load_row(bias if BIAS else None, col, None, N, BLOCK, "")
    return weights, biases


@triton.jit
def norm(value, chunk: tl.constexpr, mean, inverse, weights, biases, RMS: tl.constexpr):
    """A chunk normalised, in float32."""
    value = widen(value)
    if not RMS:
        value -= mean
    value *= inverse
    if len(weights) > 0:
        value *= widen(weights[chunk])
    if len(biases) > 0:
        value += widen(biases[chunk])
    return value


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
    # Strides and eps are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    X_STRIDE: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_ACROSS: tl.constexpr,
    SHIFT_FORM: tl.constexpr,
    SHIFT_STRIDE: tl.constexpr,
    SHIFT_ACROSS: tl.constexpr,
    SCALE2_FORM: tl.constexpr,
    SCALE2_STRIDE: tl.constexpr,
    SCALE2_ACROSS: tl.constexpr,
    WEIGHT: tl.constexpr,  # what of the parameters takes part
    BIAS: tl.constexpr,
    WEIGHT2: tl.constexpr,
    BIAS2: tl.constexpr,
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
    scale_line = operand_line(scale, row, scale_group, SCALE_FORM, SCALE_STRIDE)
    shift_line = operand_line(shift, row, shift_group, SHIFT_FORM, SHIFT_STRIDE)
    scale2_line = None if y2 is None else operand_line(scale2, row, scale2_group, SCALE2_FORM, SCALE2_STRIDE)

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads of all chunks first: a thread keeps them in flight.
    values = load_row(x + row.to(tl.int64) * X_STRIDE, col, inside, N, BLOCK, LOAD)
    if EARLY > 0:
        shifts = load_operand_row(shift_line, col, inside, N, BLOCK, SHIFT_FORM, SHIFT_ACROSS)
        scales = load_operand_row(scale_line, col, inside, N, BLOCK, SCALE_FORM, SCALE_ACROSS)
        weights, biases = load_parameters(weight, bias, col, WEIGHT, BIAS, N, BLOCK)
    if EARLY > 1:
        scales2 = load_operand_row(scale2_line, col, inside, N, BLOCK, SCALE2_FORM, SCALE2_ACROSS)
        weights2, biases2 = load_parameters(weight2, bias2, col, WEIGHT2, BIAS2, N, BLOCK)

    mean, inverse = statistics(values, col, EPS, N, BLOCK, RMS, EXACT)  # [ROWS, 1]
    if EARLY == 0:
        shifts = load_operand_row(shift_line, col, inside, N, BLOCK, SHIFT_FORM, SHIFT_ACROSS)
        scales = load_operand_row(scale_line, col, inside, N, BLOCK, SCALE_FORM, SCALE_ACROSS)
        weights, biases = load_parameters(weight, bias, col, WEIGHT, BIAS, N, BLOCK)
    stored = ()
    for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
        gate = tanh(widen(scales[chunk]), APPROXIMATE)
        value = norm(values[chunk], chunk, mean, inverse, weights, biases, RMS) * gate + widen(shifts[chunk])
        value = value.to(y.dtype.element_ty)
        if y2 is not None and (chunk + 1) * BLOCK > N:
            value = tl.where(chunk * BLOCK + col < N, value, 0.0)
        store_chunk(y + first, value, col, inside, chunk, N, BLOCK, STORE)
        stored += (value,)

    if y2 is not None:
        if EARLY < 2:
            scales2 = load_operand_row(scale2_line, col, inside, N, BLOCK, SCALE2_FORM, SCALE2_ACROSS)
            weights2, biases2 = load_parameters(weight2, bias2, col, WEIGHT2, BIAS2, N, BLOCK)
        mean, inverse = statistics(stored, col, EPS, N, BLOCK, RMS, EXACT)
        for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
            value = norm(stored[chunk], chunk, mean, inverse, weights2, biases2, RMS)
            value *= 1.0 + widen(scales2[chunk])
            store_chunk(y2 + first, value, col, inside, chunk, N, BLOCK, STORE)


# --- launcher


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
    tensors = property(given)

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Those that broadcast to x."""
        return {name: tensor for name, tensor in self.tensors.items() if name in OPERANDS}

    @property
    def parameters(self) -> dict[str, bool]:
        """Whether WEIGHT, BIAS, WEIGHT2 and BIAS2 take part."""
        layer = self.norm_type == "layer"
        takes = {}
        for number in ("", "2"):
            weight, bias = (getattr(self, name + number) is not None for name in ("weight", "bias"))
            takes |= {f"WEIGHT{number}": weight and (bias or not layer), f"BIAS{number}": weight and bias and layer}
        return takes


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    forms = {name: form(operand, batch, tokens) for name, operand in call.operands.items()}
    placed = [forms.get(name) or Form("one") for name in OPERANDS]
    major = capability(x)
    double = call.scale2 is not None
    config = TUNED.select(major, outputs=1 + double, width=columns, bytes=x.numel() * x.itemsize)
    warps, rows, block = cut(config, columns, x.itemsize)
    approximate = config.approximate and x.dtype == torch.bfloat16 and not is_interpreted(norm_tanh_mul_add_kernel)
    loaded = partial(held, call, forms, warps, rows, block)
    early = 2 if config.early == 2 and double and loaded(2) <= MOST_EARLY else min(config.early, 1)
    limited = approximate and loaded(early) + ROOM <= 4 * config.maxnreg
    pdl = config.pdl and pdl_works(norm_tanh_mul_add_kernel, major)
    constants: dict[str, object] = {}
    for name, place in zip(OPERANDS, placed, strict=True):
        constants |= place.constants(name.upper())
    return Launch.make(
        norm_tanh_mul_add_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        x if double else None,
        *call[:-2],
        batch * tokens if batch * tokens % rows else None,
        *(place.group for place in placed),
        X_STRIDE=row_stride(x),
        **constants,
        **call.parameters,
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
        **({"maxnreg": config.maxnreg} if limited else {}),
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


def held(call: Call, forms: Mapping[str, Form | None], warps: int, rows: int, block: int, early: int) -> int:
    """Bytes that a thread loads of x and of the first norm's operands, and of the second's where they are early."""
    takes = call.parameters
    size = 0  # bytes per column
    for name, tensor in call.tensors.items():
        place = forms.get(name)
        late = name.endswith("2") and early < 2
        if not late and takes.get(name.upper(), True) and (place is None or place.across):
            size += tensor.itemsize * (rows if name == "x" or (place and place.name != "one") else 1)
    return size * triton.cdiv(call.x.shape[2], block) * block // (32 * warps)


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(op, **inputs, **scalars)
    _check(op, call)
    return [] if _uncovered(call) else [plan(call)]


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    """The call of `op` with these arguments; weights, biases and eps may be left out."""
    names = [name for name in Call._fields if op == OPS[1] or not name.endswith("2")]
    named = dict(zip(names, args, strict=False)) | kwargs
    return Call(**dict.fromkeys((*VECTORS, "scale2")) | {"eps": 1e-5} | named)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(op: str, call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(op)
    optional = (*VECTORS, "scale2") if op == OPS[0] else VECTORS
    check_tensors(op, dict(zip(call._fields[:-2], call[:-2], strict=True)), optional)
    x = call.x
    expect(x.dim() == 3, "x", "three dimensions [B, S, D]", list(x.shape))
    columns, step, most = x.shape[2], COLUMNS_STEP, MAX_COLUMNS
    expect(columns % step == 0 and 0 < columns <= most, "x", f"D a multiple of {step} up to {most}", columns)
    expect(call.norm_type in NORMS, "norm_type", "'layer' or 'rms'", repr(call.norm_type))
    check_operands(op, call.operands, x.shape)
    for name, tensor in call.tensors.items():
        expect(tensor.dtype in FLOATS, name, "dtype float16, bfloat16 or float32", tensor.dtype)
        if name in VECTORS:
            expect(tensor.shape == (columns,), name, f"shape {[columns]}", list(tensor.shape))
        last = tensor.stride(-1) if tensor.dim() and tensor.shape[-1] > 1 else 1
        expect(last == 1, name, "stride 1 in its last dimension", last)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x = call.x
    like = torch.empty_strided(x.shape, output_strides(x), device="meta")
    if row_stride(x) is None or row_stride(like) != x.shape[2]:
        return f"x has shape {list(x.shape)} and strides {x.stride()}; the kernel steps evenly from row to row"
    return unfit(call.tensors) or formless(call.operands, *x.shape[:2])


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = _call(op, *args, **kwargs)
    _check(op, call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, norm_tanh_mul_add_kernel) or _uncovered(call)


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    takes = call.parameters

    def norm(x: torch.Tensor, number: str) -> torch.Tensor:
        value = x.float()
        if call.norm_type == "layer":
            value = value - value.mean(dim=-1, keepdim=True)
        value = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + call.eps)
        if takes[f"WEIGHT{number}"]:
            value = value * getattr(call, f"weight{number}").float()
        if takes[f"BIAS{number}"]:
            value = value + getattr(call, f"bias{number}").float()
        return value

    def lines(operand: torch.Tensor) -> torch.Tensor:
        return per_token(operand, call.x.shape[1]).float()

    y = _like(norm(call.x, "") * torch.tanh(lines(call.scale)) + lines(call.shift), call.x)
    if call.scale2 is None:
        return y
    return y, _like(norm(y, "2") * (1.0 + lines(call.scale2)), call.x)


def _like(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The value in x's dtype, laid out as `empty_like` x."""
    return torch.empty_like(x, requires_grad=False).copy_(value)


_PLANS = {op: Plans() for op in OPS}
_SINGLE_PLANS, _DOUBLE_PLANS = _PLANS.values()


def _run(op: str, call: Call) -> Any:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    tensors, scalars = (call[:5] if op == OPS[0] else call[:-2]), call[-2:]
    made = _PLANS[op].recall(tensors, scalars)
    if made is MISS:
        _check(op, call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        made = _PLANS[op].launch(plan(call), tensors, scalars, outputs=[0] if op == OPS[0] else [0, 0])
    return made


# --- custom ops and fakes: what torch.compile and other tracers see


def _impl(op: str, *args: Any, **kwargs: Any) -> Any:
    return _run(op, _call(op, *args, **kwargs))


def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A tensor like x."""
    return torch.empty_like(x)


def _fakes(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors like x."""
    return torch.empty_like(x), torch.empty_like(x)


_FIRST = "Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift"
_SECOND = "Tensor? weight2, Tensor? bias2, Tensor scale2"
_REST = "str norm_type, float eps=1e-05"
_single_op = register(__name__, OPS[0], f"({_FIRST}, {_REST}) -> Tensor", partial(_impl, OPS[0]), _fake)
_double_op = register(
    __name__, OPS[1], f"({_FIRST}, {_SECOND}, {_REST}) -> (Tensor, Tensor)", partial(_impl, OPS[1]), _fakes
)


# --- public functions


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
    if not is_dynamo_compiling():
        for entry in _SINGLE_PLANS.hot:
            result = entry(x, weight, bias, scale, shift, norm_type, eps)
            if result is not MISS:
                return result
    call = Call(x, weight, bias, scale, shift, None, None, None, norm_type, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _single_op(x, weight, bias, scale, shift, norm_type, eps)
    return _run(OPS[0], call)


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
    """The same as y, and norm(y) * (1 + scale2) of y as it is returned.

    Args:
        x: as above, like all but the next three.
        weight: -
        bias: -
        scale: -
        shift: -
        weight2: [D], or None for 1.
        bias2: [D], or None for 0; as bias.
        scale2: as scale.
        norm_type: of both norms.
        eps: of both norms.

    Returns:
        y and y2, new tensors like x.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _DOUBLE_PLANS.hot:
            result = entry(x, weight, bias, scale, shift, weight2, bias2, scale2, norm_type, eps)
            if result is not MISS:
                return result
    call = Call(x, weight, bias, scale, shift, weight2, bias2, scale2, norm_type, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _double_op(x, weight, bias, scale, shift, weight2, bias2, scale2, norm_type, eps)
    return _run(OPS[1], call)
