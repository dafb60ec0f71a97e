"""Modulation by slices of table + temb, added where they are used: one Triton kernel for three ops.

    gate, shift, scale = three of the slices table[:, n] + temb[..., n, :]          each sum in float32
    r = residual + gate * x                                 rounded to x's dtype, returned; without a residual: r = x
    y = norm(r) * (1 + scale) + shift                                               per token, over the D columns
    norm(r) = (r - mean(r)) / sqrt(mean((r - mean(r))^2) + eps) * weight + bias

All in float32, each output rounded to x's dtype once. temb_norm_scale_shift gives y, temb_residual gives r,
temb_residual_norm_scale_shift both; there gate, modulation, and weight with bias may be left out.

Source of the semantics: SGLang 0.5.23, `WanTransformerBlock` of `multimodal_gen/runtime/models/dits/wanvideo.py` with
`kernels/ops/diffusion/modulate/wan_temb_table_slices_triton.py` and
`kernels/ops/diffusion/norm/scale_residual_norm_cutedsl.py` (Apache-2.0); the code is our own.

Idea: with one timestep per token the slices are as large as x. Upstream reads all slices of temb, writes the sums in
float32, and reads them again; here a call reads only its slices of temb and writes no sums. A row of x is read once and
stays in registers. So does r, rounded as it is stored. Rows are cut into chunks of one 16-byte vector a thread. The
table's lines are the same for all rows: they come from the caches.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime import norm_rows
from kda_runtime.checks import FLOATS, Expect, capability, pdl_works
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    affine,
    follow_the_kernel_ahead,
    load_chunk,
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

SLICES = {"gate": "gate_table", "shift": "table", "scale": "table"}
"""Argument with the number of a slice -> the table that it is of."""
MOST_PER_THREAD = 40
"""Elements of a row that a thread holds before the row gets more warps: 5120 columns at 4 warps, as in k05."""
MOST_BYTES = 320
"""Bytes of rows that a thread may load before the statistics; its registers hold 1020."""
MOST_BYTES_EARLY = 400
"""The same, including the lines of tables, weight and bias."""
ALL = 32
"""All chunks of a row: no row of the envelope has more than this."""
MOST_WARPS = 16


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    rows: int = 1
    """Rows of a program, which share what is loaded of tables, weight and bias."""
    ahead: int = ALL
    """Most chunks of shift and scale of temb that are loaded before the statistics; each further chunk is loaded as
    many chunks before it is needed. 1 is the least, and takes the fewest registers."""
    early: bool = False
    """Lines of tables, weight and bias are loaded before the statistics, too, and not where they are used."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x and residual."""
    store: str = ""
    """Cache modifier of the stores."""
    maxnreg: int = 0
    """Limit on a thread's registers, applied if that many hold the loaded data (`norm_rows.register_limit`); 0 leaves
    the number to the compiler."""


TUNED = Table(__file__, "temb_modulation", Config)
"""Tuned configurations, chosen by `bytes` (of x), `width` (columns), `slices` (number that are read) and `streamed`
(bytes of slices per element of x where temb has a line for every row, else 0)."""


# --- kernel


@triton.jit
def load_line(line, col, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """All chunks of one line for all rows, [1, BLOCK] each; empty if there is no line, or it is loaded later."""
    chunks = ()
    if line is not None and EARLY:
        chunks = load_row(line, col, None, N, BLOCK, "")
    return chunks


@triton.jit
def table_sum(slices, lines, line, col, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk of temb's slice plus the table's, which is in `lines` if it is loaded already, else loaded: float32."""
    if len(lines) > 0:
        return widen(slices[chunk]) + widen(lines[chunk])
    else:
        return widen(slices[chunk]) + widen(load_chunk(line, col, None, chunk, N, BLOCK, ""))


@triton.jit(do_not_specialize=["rows"])
def temb_modulation_kernel(
    y,  # [B * S, D], None where r alone is wanted
    residual_out,  # [B * S, D], None without a residual, as is residual
    residual,  # [B * S, D]
    x,  # [B * S, D]
    temb,  # lines of [K, D]
    gate_table,  # [K, D], None for a gate of 1
    table,  # [K, D], None without a modulation
    weight,  # [D] or None, like bias
    bias,
    rows,  # B * S, None where the programs' rows divide it
    group,  # rows that share a line of temb, None where the form needs none
    # Places, forms and eps are fixed per model: as constants they cost the host nothing at launch.
    RESIDUAL: tl.constexpr,  # the `Form` of each tensor
    X: tl.constexpr,
    TEMB: tl.constexpr,
    STEP: tl.constexpr,  # elements from slice to slice of temb
    GATE_STEP: tl.constexpr,  # the same of gate_table
    TABLE_STEP: tl.constexpr,  # and of table
    GATE: tl.constexpr,  # numbers of slices
    SHIFT: tl.constexpr,
    SCALE: tl.constexpr,
    AFFINE: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # chunks of shift and scale that are loaded before they are needed
    EARLY: tl.constexpr,
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
    modulated: tl.constexpr = table is not None
    gated: tl.constexpr = gate_table is not None
    line = operand_line(temb, row, group, TEMB)
    gate_line = gate_table + GATE * GATE_STEP if gated else None
    shift_line = table + SHIFT * TABLE_STEP if modulated else None
    scale_line = table + SCALE * TABLE_STEP if modulated else None

    follow_the_kernel_ahead(PDL)

    # Loads of all chunks first: a thread keeps them in flight.
    values = load_row(operand_line(x, row, None, X), col, inside, N, BLOCK, LOAD)
    if residual is not None:
        residuals = load_row(operand_line(residual, row, None, RESIDUAL), col, inside, N, BLOCK, LOAD)
    if gated:
        gates = load_operand_row(line + GATE * STEP, col, inside, N, BLOCK, TEMB)
        gate_lines = load_line(gate_line, col, N, BLOCK, EARLY)
    if modulated:
        scales = load_operand_row(line + SCALE * STEP, col, inside, FIRST, BLOCK, TEMB)
        shifts = load_operand_row(line + SHIFT * STEP, col, inside, FIRST, BLOCK, TEMB)
    scale_lines = load_line(scale_line, col, N, BLOCK, EARLY)
    shift_lines = load_line(shift_line, col, N, BLOCK, EARLY)
    weights = load_line(weight if AFFINE else None, col, N, BLOCK, EARLY)
    biases = load_line(bias if AFFINE else None, col, N, BLOCK, EARLY)

    if residual is not None:
        sums = ()  # rounded, as they are stored
        for chunk in tl.static_range(CHUNKS):
            if gated:
                gate = table_sum(gates, gate_lines, gate_line, col, chunk, N, BLOCK)
                value = tl.fma(gate, widen(values[chunk]), widen(residuals[chunk]))
            else:
                # Not `widen`: without it the compiler adds pairs in bfloat16, one instruction with the same result.
                value = values[chunk].to(tl.float32) + residuals[chunk].to(tl.float32)
            value = value.to(residual_out.dtype.element_ty)
            sums += (widen(value) if gated else value.to(tl.float32),)
            store_chunk(residual_out + first, value, col, inside, chunk, N, BLOCK, STORE)
        values = sums

    if y is not None:
        # A mean of values around 64 is off by 1e-5, which only float32 outputs show: exact there.
        mean, inverse = statistics(values, col, EPS, N, BLOCK, False, y.dtype.element_ty == tl.float32)  # [ROWS, 1]
        for chunk in tl.static_range(CHUNKS):
            if modulated and chunk + AHEAD < CHUNKS:
                scales += (load_operand_chunk(line + SCALE * STEP, col, inside, chunk + AHEAD, N, BLOCK, TEMB),)
                shifts += (load_operand_chunk(line + SHIFT * STEP, col, inside, chunk + AHEAD, N, BLOCK, TEMB),)
            value = norm_chunk(values, chunk, mean, inverse, weights, biases)
            if AFFINE and not EARLY:
                value = affine(value, weight, bias, col, chunk, N, BLOCK)
            if modulated:
                scale = table_sum(scales, scale_lines, scale_line, col, chunk, N, BLOCK)
                shift = table_sum(shifts, shift_lines, shift_line, col, chunk, N, BLOCK)
                value = value * (1.0 + scale) + shift
            store_chunk(y + first, value, col, inside, chunk, N, BLOCK, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of any op, in the order of the one that has all."""

    residual: torch.Tensor | None
    x: torch.Tensor
    temb: torch.Tensor
    gate_table: torch.Tensor | None
    table: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    gate: int
    shift: int
    scale: int
    eps: float


class Rows(NamedTuple):
    """A call as `norm_rows` sees it: one slice of temb stands for all slices, which have the same layout."""

    residual: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    temb: torch.Tensor
    gate_table: torch.Tensor | None
    table: torch.Tensor | None
    eps: float
    norm_type: str = "layer"


def rows_of(call: Call) -> Rows:
    """The call with the first slices of temb and the tables."""
    tables = (None if table is None else table[:, 0] for table in (call.gate_table, call.table))
    return Rows(call.residual, call.x, call.weight, call.bias, call.temb.select(-2, 0), *tables, call.eps)


def slices_of(call: Call) -> dict[str, int]:
    """The numbers of the slices that are read, by the argument that gives them."""
    return {name: getattr(call, name) for name, table in SLICES.items() if getattr(call, table) is not None}


def plan_of(call: Call, normed: bool) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    total = batch * tokens
    rows_call = rows_of(call)
    places = norm_rows.places(rows_call)
    slices = slices_of(call)
    across = places["temb"].form
    streamed = len(slices) * call.temb.itemsize if across.name in ("rows", "cycle") else 0
    major = capability(x)
    config = TUNED.select(major, bytes=x.nbytes, width=columns, slices=len(slices), streamed=streamed)
    warps, rows, block = cut(config, columns, x.itemsize)
    each = norm_rows.column_bytes(rows_call, places, rows)
    ahead, early, held = loads_ahead(config, each, slices, columns, warps, block)
    pdl = config.pdl and pdl_works(temb_modulation_kernel, major)
    return Launch.make(
        temb_modulation_kernel,
        (triton.cdiv(total, rows),),
        x if normed else None,
        None if call.residual is None else x,
        *call[:-4],
        total if total % rows else None,
        places["temb"].group,
        RESIDUAL=None if call.residual is None else places["residual"].form,
        X=places["x"].form,
        TEMB=across,
        STEP=call.temb.stride(-2),
        GATE_STEP=0 if call.gate_table is None else call.gate_table.stride(1),
        TABLE_STEP=0 if call.table is None else call.table.stride(1),
        **{name.upper(): slices.get(name, 0) for name in SLICES},
        AFFINE="weight" in places,
        EPS=float(call.eps),
        N=columns,
        BLOCK=block,
        ROWS=rows,
        AHEAD=ahead,
        EARLY=early,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=warps,
        launch_pdl=pdl,
        **norm_rows.register_limit(config.maxnreg, held),
    )


def plan(call: Call) -> Launch:
    """The launch of the ops with a norm."""
    return plan_of(call, normed=True)


def plan_residual(call: Call) -> Launch:
    """The launch of `temb_residual`."""
    return plan_of(call, normed=False)


def cut(config: Config, columns: int, item_size: int) -> tuple[int, int, int]:
    """Warps and rows of a program, and columns of a chunk."""
    # Short rows do not fill the warps, long ones do not fit the registers of few.
    warps = min(config.warps, triton.next_power_of_2(triton.cdiv(columns, vector_width(1, item_size))))
    # Fewer warps, down to a quarter, where then no thread idles in a row's last chunk.
    counts = [count for count in (warps, warps // 2, warps // 4) if columns <= MOST_PER_THREAD * 32 * count]
    warps = next((count for count in counts if columns % vector_width(count, item_size) == 0), warps)
    while warps < MOST_WARPS and columns > MOST_PER_THREAD * 32 * warps:
        warps *= 2
    rows = config.rows
    while rows > 1 and columns * rows > 2 * MOST_PER_THREAD * 32 * warps:
        rows //= 2
    return warps, rows, min(vector_width(warps, item_size), triton.next_power_of_2(columns))


def loads_ahead(
    config: Config, each: dict[str, int], slices: dict[str, int], columns: int, warps: int, block: int
) -> tuple[int, bool, int]:
    """Chunks of shift and scale that are loaded ahead, whether lines are early, and the bytes that a thread then holds.

    `each` are the bytes of one column that a program loads of each tensor; of temb and the tables for one slice.
    """
    chunks = triton.cdiv(columns, block)

    def bytes_of(*names: str) -> int:
        """Bytes of these tensors per thread and chunk."""
        return sum(each.get(name, 0) for name in names) * block // (32 * warps)

    gated, modulated = "gate" in slices, "scale" in slices
    whole = (bytes_of("residual", "x") + gated * bytes_of("temb")) * chunks
    step = 2 * modulated * bytes_of("temb")
    lines = (gated * bytes_of("gate_table") + 2 * modulated * bytes_of("table") + bytes_of("weight", "bias")) * chunks
    ahead = min(config.ahead, chunks, max((MOST_BYTES - whole) // step, 1)) if step else chunks
    held = whole + step * ahead
    early = config.early and held + lines <= MOST_BYTES_EARLY
    return ahead, early, held + lines * early


# --- what is wrong with a call, and the path for what the kernel does not cover


def _check(call: Call, expect: Expect) -> None:
    temb, sizes = call.temb, list(call.temb.shape)
    expect(call.x.dim() == 3, "x", "three dimensions [B, S, D]", list(call.x.shape))
    expect(len(sizes) in (3, 4), "temb", "four dimensions [B, S, K, D] or three [B, K, D]", sizes)
    batch, tokens, columns = call.x.shape
    *outer, slices, last = sizes
    fits = last == columns and all(n in (1, full) for n, full in zip(outer, (batch, tokens), strict=False))
    whole = [batch, tokens, "K", columns] if len(sizes) == 4 else [batch, "K", columns]
    expect(fits, "temb", f"a shape that broadcasts to {whole}".replace("'", ""), sizes)
    for name in ("gate_table", "table"):
        table = getattr(call, name)
        if table is not None:
            wanted = [1, slices, columns]
            expect(list(table.shape) == wanted, name, f"shape {wanted}", list(table.shape))
            expect(table.stride(2) == 1, name, "stride 1 in its last dimension", table.stride(2))
    expect(temb.stride(-1) == 1, "temb", "stride 1 in its last dimension", temb.stride(-1))
    for name, number in slices_of(call).items():
        expect(number in range(slices), name, f"the number of a slice, 0 to {slices - 1}", number)
    expect(slices > 0, "temb", "at least one slice", sizes)
    for name in ("temb", "gate_table", "table"):
        tensor = getattr(call, name)
        if tensor is not None:
            expect(tensor.dtype in FLOATS, name, "dtype float16, bfloat16 or float32", tensor.dtype)
    norm_rows.check(rows_of(call), expect)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    return norm_rows.uncovered(rows_of(call))


def _slice(call: Call, name: str) -> torch.Tensor:
    """One slice of table + temb, float32, in a form that broadcasts against x."""
    number = getattr(call, name)
    part = getattr(call, SLICES[name])[:, number].float() + call.temb[..., number, :].float()
    return part if call.temb.dim() == 4 else part.unsqueeze(1)


def _plain_residual(call: Call) -> torch.Tensor:
    """R in PyTorch."""
    assert call.residual is not None
    gated = call.x.float() if call.gate_table is None else _slice(call, "gate") * call.x.float()
    return norm_rows.like(call.x, call.residual.float() + gated)


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The ops with a norm, in PyTorch."""
    r = call.x if call.residual is None else _plain_residual(call)
    used = norm_rows.used(rows_of(call))
    y = norm_rows.plain_norm(r.float(), used.get("weight"), used.get("bias"), call.eps, rms=False)
    if call.table is not None:
        y = y * (1.0 + _slice(call, "scale")) + _slice(call, "shift")
    y = norm_rows.like(call.x, y)
    return y if call.residual is None else (y, r)


# --- public functions

_op = partial(Op, arguments=Call, kernel=temb_modulation_kernel, check=_check, uncovered=_uncovered)
NORM = _op("temb_norm_scale_shift", plan=plan, plain=_plain, outputs=("x",), required=("table",))
BOTH = _op("temb_residual_norm_scale_shift", plan=plan, plain=_plain, outputs=("x", "x"), required=("residual",))
RESIDUAL = _op(
    "temb_residual",
    plan=plan_residual,
    plain=_plain_residual,
    outputs=("x",),
    required=("residual", "gate_table"),
    fixed={"shift": 0, "scale": 0, "eps": 1e-6},
)


@NORM.public
def temb_norm_scale_shift(
    x: torch.Tensor, temb: torch.Tensor, table: torch.Tensor, shift: int = 0, scale: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """LayerNorm of x, times 1 + scale, plus shift; scale and shift are slices of table + temb.

    Args:
        x: [B, S, D], float16, bfloat16 or float32; D a multiple of 256 up to 8192; rows may be apart from each other.
        temb: [B, S, K, D], or [B, K, D] for a line per batch; any size in front of K may be 1; any of the dtypes.
        table: [1, K, D], any of the dtypes.
        shift: number of the slice that is added.
        scale: number of the slice that is multiplied by.
        eps: added to the variance.

    Returns:
        A new tensor like x.

    CPU tensors, uneven strides and gradients take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return NORM.call(None, x, temb, None, table, None, None, 0, shift, scale, eps)


@BOTH.public
def temb_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    temb: torch.Tensor,
    gate_table: torch.Tensor | None,
    table: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: int = 2,
    shift: int = 0,
    scale: int = 1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for r = residual + x * gate instead of x: r as it is returned, rounded to x's dtype.

    `gate` is a slice of gate_table + temb, or 1 where `gate_table` is None; `table` None leaves scale and shift out,
    `weight` and `bias`, [D], are taken together or not at all. `residual` is [B, S, D] in any of the three dtypes; its
    rows may be apart from each other. The others are as above, and so are errors.

    Returns:
        y and r, new tensors like x.
    """
    return BOTH.call(residual, x, temb, gate_table, table, weight, bias, gate, shift, scale, eps)


@RESIDUAL.public
def temb_residual(
    residual: torch.Tensor, x: torch.Tensor, temb: torch.Tensor, gate_table: torch.Tensor, gate: int = 2
) -> torch.Tensor:
    """R alone: residual + x * gate, a new tensor like x. Arguments and errors are as above."""
    return RESIDUAL.call(residual, x, temb, gate_table, None, None, None, gate, 0, 0, 1e-6)
