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

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.broadcast import row_stride
from kda_runtime.checks import Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    affine,
    follow_the_kernel_ahead,
    load_chunk,
    statistics,
    store_chunk,
    vector_width,
    widen,
)
from kda_runtime.tuned_table import Table

MODULATION = ("scale0", "shift0", "gate0", "scale1", "shift1", "gate1")
Strides = namedtuple("Strides", MODULATION)
"""For each modulation tensor, elements from one batch's row to the next one's: a constant of the kernel."""
MOST_BYTES = 65536
"""Most bytes of a row of x: upstream's envelope."""
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
    """Rows of a program, with warps / rows warps each. If it equals `warps`, a row stays within one warp."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = True
    """Scale, shift and gate are loaded before the statistics instead of after them."""


TUNED = Table(__file__, "select01", Config)
"""Tuned configurations, chosen by `elements` (of x)."""


# --- kernel


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
    STRIDES: tl.constexpr,  # `Strides`
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

    follow_the_kernel_ahead(PDL)

    # The index first: three loads wait for it. Then all tiles of x, so that they are in flight together.
    index += row.to(tl.int64) * INDEX_STRIDE
    chosen = (tl.load(index) if rows is None else tl.load(index, mask=inside, other=0)) != 0  # [ROWS, 1]
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (load_chunk(x + first, lane, inside, tile, C, COLS, ""),)
        if residual is not None:
            loaded += (load_chunk(residual + first, lane, inside, tile, C, COLS, ""),)
            loaded += (load_chunk(residual_gate + first, lane, inside, tile, C, COLS, ""),)

    scale_row = tl.where(chosen, scale1 + batch * STRIDES.scale1, scale0 + batch * STRIDES.scale0)  # [ROWS, 1]
    shift_row = tl.where(chosen, shift1 + batch * STRIDES.shift1, shift0 + batch * STRIDES.shift0)
    gate_row = tl.where(chosen, gate1 + batch * STRIDES.gate1, gate0 + batch * STRIDES.gate0)
    modulation = ()
    if EARLY:
        for tile in tl.static_range(TILES):
            modulation += (load_chunk(scale_row, lane, inside, tile, C, COLS, ""),)
            modulation += (load_chunk(shift_row, lane, inside, tile, C, COLS, ""),)
            modulation += (load_chunk(gate_row, lane, inside, tile, C, COLS, ""),)

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
        scale = modulation[3 * tile] if EARLY else load_chunk(scale_row, lane, inside, tile, C, COLS, "")
        shift = modulation[3 * tile + 1] if EARLY else load_chunk(shift_row, lane, inside, tile, C, COLS, "")
        gate = modulation[3 * tile + 2] if EARLY else load_chunk(gate_row, lane, inside, tile, C, COLS, "")
        result = normed * (1.0 + widen(scale)) + widen(shift)
        store_chunk(y + first, result, lane, inside, tile, C, COLS, STORE)
        store_chunk(gate_out + first, gate, lane, inside, tile, C, COLS, STORE)


# --- plan


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


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, channels = x.shape
    major = capability(x)
    config = TUNED.select(major, elements=x.numel())
    warps, rows, cols = block(config, channels, x.itemsize)
    pdl = config.pdl and pdl_works(select01_kernel, major)
    return Launch.make(
        select01_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,
        None if call.residual is None else x,
        x,
        *call[:-1],
        batch * tokens if batch * tokens % rows else None,
        tokens if batch > 1 else None,
        STRIDES=Strides(*[getattr(call, name).stride(0) if batch > 1 else 0 for name in MODULATION]),
        INDEX_STRIDE=row_stride(call.index[..., None]),
        EPS=float(call.eps),
        C=channels,
        ROWS=rows,
        COLS=cols,
        # Modulation in registers beside a long row would spill.
        EARLY=config.early and (rows > 1 or channels * x.itemsize <= 2 * MOST_PER_THREAD * 32 * warps),
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


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.x.dim() == 3, "x", "three dimensions [B, L, C]", list(call.x.shape))
    batch, tokens, channels = call.x.shape
    shapes = dict.fromkeys(MODULATION, (batch, channels))
    shapes |= {"index": (batch, tokens), "weight": (channels,), "bias": (channels,)}
    for name, tensor in given(call).items():
        shape = shapes.get(name, call.x.shape)
        expect(tensor.shape == shape, name, f"shape {list(shape)}", list(tensor.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    tensors = given(call)
    if call.x.shape[2] * call.x.itemsize > MOST_BYTES:
        return f"x has {call.x.shape[2]} channels; the kernel takes rows of up to {MOST_BYTES} bytes"
    for name, tensor in tensors.items():
        if name in ("x", "residual", "residual_gate") and not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
    for zero, one in zip(MODULATION[:3], MODULATION[3:], strict=True):
        if tensors[zero].dtype != tensors[one].dtype:
            return f"{one} has dtype {tensors[one].dtype}, {zero} another; the kernel chooses between addresses"
    if row_stride(call.index[..., None]) is None:
        return f"index has strides {call.index.stride()}; the kernel steps evenly from row to row"
    vectors = {name: tensor for name, tensor in tensors.items() if name != "index"}
    return unfit(tensors) or scattered(vectors)


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


# --- public functions

_op = partial(
    Op[Call],
    arguments=Call,
    kernel=select01_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    integers=("index",),
    contiguous=True,
)
SELECT01 = _op("fuse_layernorm_scale_shift_gate_select01_kernel", outputs=("x", "x"))
RESIDUAL_SELECT01 = _op(
    "fuse_residual_layernorm_scale_shift_gate_select01_kernel",
    outputs=("x", "x", "x"),
    required=("residual", "residual_gate"),
)


@SELECT01.public
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
    return SELECT01.call(x, None, None, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps)


@RESIDUAL_SELECT01.public
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
    """The same for residual + residual_gate * x instead of x.

    `residual` and `residual_gate` are [B, L, C] and contiguous. The other arguments are as above.

    Returns:
        y, residual + residual_gate * x, and the chosen gates, [B, L, C] each, contiguous, x's dtype.

    Raises:
        ValueError: as above.
    """
    return RESIDUAL_SELECT01.call(
        x, residual, residual_gate, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps
    )
