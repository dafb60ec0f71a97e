"""Norm, scale and shift, of x or of a gated residual: one Triton kernel for both ops, launched directly.

    r = residual + gate * x                                 rounded to x's dtype, returned; without a residual: r = x
    y = norm(r) * (1 + scale) + shift                                               per token, over the D columns
    norm(r) = r / sqrt(mean(r^2) + eps) * weight                                    "rms"
    norm(r) = (r - mean(r)) / sqrt(mean((r - mean(r))^2) + eps) * weight + bias     "layer"

All in float32, each output rounded to x's dtype once. y and r are new tensors like x. gate may be None (1), weight and
bias may be left out; as upstream has it, RMSNorm takes no notice of a bias, and LayerNorm of one of the two without the
other.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/cutedsl/scale_residual_norm_scale_shift.py`
(Apache-2.0); the code is our own.

Idea: the op only streams. A row of x is read once and stays in registers; so does r, as it is stored, in x's dtype:
y is the norm of the r that the caller gets, and a 16-bit row takes half the registers. Rows are cut into chunks of one
16-byte vector a thread: 5120 columns are 5 chunks of 1024. Operands of every broadcast form are read where they lie
(`kda_core.rows`); what all rows of a program share is loaded once.
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
from kda_core.launch import MISS, Launch, Plans, is_tracing
from kda_core.rows import (
    Form,
    check_operands,
    form,
    formless,
    load_chunk,
    load_operand_chunk,
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

OPS = ("fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift")
"""Without and with a residual."""
NORMS = ("layer", "rms")
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""Upstream's envelope: the number of columns is a multiple of the one and at most the other."""
OPERANDS = ("gate", "scale", "shift")
OPTIONAL = ("gate", "weight", "bias")
MOST_PER_THREAD = 40
"""Elements of a row that a thread holds before the row gets more warps: 5120 columns at 4 warps."""
MOST_BYTES_OF_ROWS = 160
"""Bytes of x that a thread may hold of its program's rows: at 4 warps two of 5120 16-bit columns, one of float32."""
MOST_BYTES_HELD, MOST_BYTES_AHEAD = 320, 256
"""Bytes of everything loaded before the statistics that a thread may hold, of the 1020 of its registers: the one where
that is all, else the other, and of weight, bias, scale and shift as many chunks as fit, but at least one."""
ROOM = 128
"""Bytes of registers for all but what is loaded: with less, limits to the registers made variants spill."""
ALL = 16
"""Chunks: no row of the envelope has more."""
MOST_WARPS = 16


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    rows: int = 1
    """Rows of a program, which share what is loaded of weight, bias and one-line operands."""
    whole: bool = True
    """Fewer warps, down to a quarter, where so a row is cut into whole chunks and no thread idles in the last one."""
    ahead: int = ALL
    """Chunks of weight, bias, scale and shift that are loaded before the statistics; behind these, each further one is
    loaded so many chunks before it is needed. At least 1, which takes the fewest registers."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x and residual."""
    store: str = ""
    """Cache modifier of the stores."""
    maxnreg: int = 0
    """Registers that a thread has at most, where they hold what is loaded and `ROOM`; 0 leaves them to the compiler."""


TUNED = Table(__file__, "norm_scale_shift", Config)
"""Features: `bytes` (of x), `width` (columns), `residual` (0 or 1) and `streamed` (bytes of gate, scale and shift that
come with an element of x, where they differ from row to row)."""


# --- kernel


@triton.jit
def residual_sum(
    out,
    values,  # chunks of x
    residuals,
    gates,  # or nothing
    col,
    inside,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE: tl.constexpr,
):
    """The sum residual + gate * x, stored at `out` and, as it is there, in float32: a tuple of chunks."""
    sums = ()
    for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
        if len(gates) > 0:
            value = tl.fma(widen(gates[chunk]), widen(values[chunk]), widen(residuals[chunk]))
            value = value.to(out.dtype.element_ty)
            sums += (widen(value),)
        else:
            # Not `widen`: without it the compiler adds pairs in bfloat16, one instruction with the same result.
            value = values[chunk].to(tl.float32) + residuals[chunk].to(tl.float32)
            value = value.to(out.dtype.element_ty)
            sums += (value.to(tl.float32),)
        store_chunk(out, value, col, inside, chunk, N, BLOCK, STORE)
    return sums


@triton.jit
def next_chunk(
    chunks,
    line,
    col,
    inside,
    chunk: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """A chunk of an operand behind those that are loaded; one value for all columns is there already."""
    if ACROSS:
        return load_operand_chunk(line, col, inside, chunk, N, BLOCK, FORM, True)
    else:
        return chunks[0]


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
    # Strides and eps are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    RESIDUAL_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    GATE_FORM: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_ACROSS: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_ACROSS: tl.constexpr,
    SHIFT_FORM: tl.constexpr,
    SHIFT_STRIDE: tl.constexpr,
    SHIFT_ACROSS: tl.constexpr,
    WEIGHT: tl.constexpr,  # whether it takes part
    BIAS: tl.constexpr,
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
    scale_line = operand_line(scale, row, scale_group, SCALE_FORM, SCALE_STRIDE)
    shift_line = operand_line(shift, row, shift_group, SHIFT_FORM, SHIFT_STRIDE)

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads of all chunks first: a thread keeps them in flight.
    values = load_row(x + row.to(tl.int64) * X_STRIDE, col, inside, N, BLOCK, LOAD)
    if residual is not None:
        residuals = load_row(residual + row.to(tl.int64) * RESIDUAL_STRIDE, col, inside, N, BLOCK, LOAD)
        gate_line = None if gate is None else operand_line(gate, row, gate_group, GATE_FORM, GATE_STRIDE)
        gates = load_operand_row(gate_line, col, inside, N, BLOCK, GATE_FORM, GATE_ACROSS)
    # The first chunks of the rest as well.
    scales = load_operand_row(scale_line, col, inside, FIRST, BLOCK, SCALE_FORM, SCALE_ACROSS)
    shifts = load_operand_row(shift_line, col, inside, FIRST, BLOCK, SHIFT_FORM, SHIFT_ACROSS)
    weights = load_row(weight if WEIGHT else None, col, None, FIRST, BLOCK, "")
    biases = load_row(bias if BIAS else None, col, None, FIRST, BLOCK, "")

    if residual is not None:
        values = residual_sum(residual_out + first, values, residuals, gates, col, inside, N, BLOCK, STORE)
    # A mean of values around 64 is off by 1e-5, which only float32 outputs show: exact there.
    mean, inverse = statistics(values, col, EPS, N, BLOCK, RMS, y.dtype.element_ty == tl.float32)  # [ROWS, 1]

    for chunk in tl.static_range(CHUNKS):
        if chunk + AHEAD < CHUNKS:
            scales += (next_chunk(scales, scale_line, col, inside, chunk + AHEAD, N, BLOCK, SCALE_FORM, SCALE_ACROSS),)
            shifts += (next_chunk(shifts, shift_line, col, inside, chunk + AHEAD, N, BLOCK, SHIFT_FORM, SHIFT_ACROSS),)
            if WEIGHT:
                weights += (load_chunk(weight, col, None, chunk + AHEAD, N, BLOCK, ""),)
            if BIAS:
                biases += (load_chunk(bias, col, None, chunk + AHEAD, N, BLOCK, ""),)
        value = widen(values[chunk])
        if not RMS:
            value -= mean
        value *= inverse
        if WEIGHT:
            value *= widen(weights[chunk])
        if BIAS:
            value += widen(biases[chunk])
        value = value * (1.0 + widen(scales[chunk])) + widen(shifts[chunk])
        store_chunk(y + first, value, col, inside, chunk, N, BLOCK, STORE)


# --- launcher


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
    tensors = property(given)

    @property
    def op(self) -> str:
        """The public op that this is a call of."""
        return OPS[self.residual is not None]

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Those that broadcast to x."""
        return {name: tensor for name, tensor in self.tensors.items() if name in OPERANDS}

    @property
    def parameters(self) -> dict[str, bool]:
        """Whether WEIGHT and BIAS take part."""
        weight, bias, layer = self.weight is not None, self.bias is not None, self.norm_type == "layer"
        return {"WEIGHT": weight and (bias or not layer), "BIAS": weight and bias and layer}


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    forms = {name: form(operand, batch, tokens) for name, operand in call.operands.items()}
    placed = [forms.get(name) or Form("one") for name in OPERANDS]
    streamed = sum(
        operand.itemsize
        for name, operand in call.operands.items()
        if (at := forms[name]) is not None and at.across and at.name in ("rows", "cycle")
    )
    major = capability(x)
    config = TUNED.select(
        major,
        bytes=x.numel() * x.itemsize,
        width=columns,
        residual=int(call.residual is not None),
        streamed=streamed,
    )
    warps, rows, block = cut(config, columns, x.itemsize)
    ahead, held = loads_ahead(call, forms, config.ahead, warps, rows, block)
    pdl = config.pdl and pdl_works(norm_scale_shift_kernel, major)
    constants: dict[str, object] = {}
    for name, place in zip(OPERANDS, placed, strict=True):
        constants |= place.constants(name.upper())
    return Launch.make(
        norm_scale_shift_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        None if call.residual is None else x,
        *call[:-2],
        batch * tokens if batch * tokens % rows else None,
        *(place.group for place in placed),
        RESIDUAL_STRIDE=None if call.residual is None else row_stride(call.residual),
        X_STRIDE=row_stride(x),
        **constants,
        **call.parameters,
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
        **({"maxnreg": config.maxnreg} if held + ROOM <= 4 * config.maxnreg else {}),
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


def loads_ahead(
    call: Call, forms: Mapping[str, Form | None], wanted: int, warps: int, rows: int, block: int
) -> tuple[int, int]:
    """Chunks of weight, bias, scale and shift that are loaded ahead, and the bytes that a thread holds with them."""
    takes = call.parameters
    whole = each = 0  # bytes of a chunk for a thread: of what is loaded of whole rows, and of the rest
    for name, tensor in call.tensors.items():
        place = forms.get(name)
        if takes.get(name.upper(), True) and (place is None or place.across):
            lines = rows if name in ("x", "residual") or (place and place.name != "one") else 1
            size = tensor.itemsize * lines * block // (32 * warps)
            if name in ("x", "residual", "gate"):
                whole += size
            else:
                each += size
    ahead = chunks = triton.cdiv(call.x.shape[2], block)
    if (whole + each) * chunks > MOST_BYTES_HELD:
        ahead = min(max((MOST_BYTES_AHEAD - whole * chunks) // max(each, 1), 1), chunks)
    ahead = min(ahead, wanted)
    return ahead, whole * chunks + each * ahead


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(op, **inputs, **scalars)
    _check(op, call)
    return [] if _uncovered(call) else [plan(call)]


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    """The call of `op` with these arguments; gate, weight, bias and eps may be left out."""
    names = [name for name in Call._fields if op == OPS[1] or name not in ("residual", "gate")]
    named = dict(zip(names, args, strict=False)) | kwargs
    return Call(**dict.fromkeys(("residual", *OPTIONAL)) | {"eps": 1e-5} | named)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(op: str, call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(op)
    optional = ("residual", *OPTIONAL) if op == OPS[0] else OPTIONAL
    check_tensors(op, dict(zip(call._fields[:-2], call[:-2], strict=True)), optional)
    x = call.x
    expect(x.dim() == 3, "x", "three dimensions [B, S, D]", list(x.shape))
    columns, step, most = x.shape[2], COLUMNS_STEP, MAX_COLUMNS
    expect(columns % step == 0 and 0 < columns <= most, "x", f"D a multiple of {step} up to {most}", columns)
    expect(call.norm_type in NORMS, "norm_type", "'layer' or 'rms'", repr(call.norm_type))
    check_operands(op, call.operands, x.shape)
    for name, tensor in call.tensors.items():
        expect(tensor.dtype in FLOATS, name, "dtype float16, bfloat16 or float32", tensor.dtype)
        if name not in OPERANDS:
            shape = x.shape if name in ("x", "residual") else x.shape[2:]
            expect(tensor.shape == shape, name, f"shape {list(shape)}", list(tensor.shape))
        last = tensor.stride(-1) if tensor.dim() and tensor.shape[-1] > 1 else 1
        expect(last == 1, name, "stride 1 in its last dimension", last)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x = call.x
    for name, tensor in call.tensors.items():
        if name in ("x", "residual") and row_stride(tensor) is None:
            return f"{name} has strides {tensor.stride()}; the kernel steps evenly from row to row"
    like = torch.empty_strided(x.shape, output_strides(x), device="meta")
    if row_stride(like) != x.shape[2]:
        return f"x has strides {x.stride()}; an output like it is not written row after row"
    return unfit(call.tensors) or formless(call.operands, *x.shape[:2])


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = _call(op, *args, **kwargs)
    _check(op, call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, norm_scale_shift_kernel) or _uncovered(call)


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same maths in PyTorch, for whatever the kernel does not cover."""

    def lines(operand: torch.Tensor) -> torch.Tensor:
        return per_token(operand, call.x.shape[1]).float()

    def like_x(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(call.x, requires_grad=False).copy_(value)

    x = call.x
    if call.residual is not None:
        gate = 1.0 if call.gate is None else lines(call.gate)
        x = like_x(call.residual.float() + gate * x.float())
    value = x.float()
    if call.norm_type == "layer":
        value = value - value.mean(dim=-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + call.eps)
    takes = call.parameters
    if takes["WEIGHT"] and call.weight is not None:
        value = value * call.weight.float()
    if takes["BIAS"] and call.bias is not None:
        value = value + call.bias.float()
    y = like_x(value * (1.0 + lines(call.scale)) + lines(call.shift))
    return y if call.residual is None else (y, x)


_PLANS = {op: Plans() for op in OPS}
_SINGLE_PLANS, _RESIDUAL_PLANS = _PLANS.values()


def _run(op: str, call: Call) -> Any:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    tensors, scalars = call[:-2], call[-2:]
    outputs = [1, 1]  # like x
    if op == OPS[0]:
        tensors, outputs = (call.x, *call[3:-2]), [0]
    made = _PLANS[op].recall(tensors, scalars)
    if made is MISS:
        _check(op, call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        made = _PLANS[op].launch(plan(call), tensors, scalars, outputs)
    return made


# --- custom ops and fakes: what torch.compile and other tracers see


def _impl(op: str, *args: Any, **kwargs: Any) -> Any:
    return _run(op, _call(op, *args, **kwargs))


def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A tensor like x."""
    return torch.empty_like(x)


def _fakes(_residual: torch.Tensor, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors like x."""
    return torch.empty_like(x), torch.empty_like(x)


_FIRST = "Tensor residual, Tensor x, Tensor? gate"
_REST = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps=1e-05"
_single_op = register(__name__, OPS[0], f"(Tensor x, {_REST}) -> Tensor", partial(_impl, OPS[0]), _fake)
_residual_op = register(__name__, OPS[1], f"({_FIRST}, {_REST}) -> (Tensor, Tensor)", partial(_impl, OPS[1]), _fakes)


# --- public functions


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
    if not is_dynamo_compiling():
        for entry in _SINGLE_PLANS.hot:
            result = entry(x, weight, bias, scale, shift, norm_type, eps)
            if result is not MISS:
                return result
    call = Call(None, x, None, weight, bias, scale, shift, norm_type, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _single_op(x, weight, bias, scale, shift, norm_type, eps)
    return _run(OPS[0], call)


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
    """The same of r = residual + gate * x as it is returned, rounded to x's dtype.

    Args:
        residual: [B, S, D], any of the three dtypes; rows may be apart from each other.
        x: as above, like all but the next one.
        gate: as scale, or None for 1.
        weight: -
        bias: -
        scale: -
        shift: -
        norm_type: -
        eps: -

    Returns:
        y and r, new tensors like x.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _RESIDUAL_PLANS.hot:
            result = entry(residual, x, gate, weight, bias, scale, shift, norm_type, eps)
            if result is not MISS:
                return result
    call = Call(residual, x, gate, weight, bias, scale, shift, norm_type, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _residual_op(residual, x, gate, weight, bias, scale, shift, norm_type, eps)
    return _run(OPS[1], call)
