"""Scale and shift: one Triton kernel for every broadcast form, launched directly.

    y = x * (scale_constant + scale) + shift            [B, L, C], in float32, rounded to x's dtype once

scale and shift broadcast from 0 to 4 dimensions; two scalars (0-D or [1]) that are both zero leave x as it is, whatever
`scale_constant` is.

In the op's exact mode the result has upstream's bits: scale_constant + scale is rounded to scale's dtype; product and
sum are each computed in the wider dtype of their operands, or as one fused multiply-add where both have one dtype.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/scale_shift.py` (Apache-2.0); the code is our
own.

Idea: the op only streams. x is taken as B * L rows. Where the line of an operand lies for a row is a constant of the
kernel (`broadcast.Form`), of four kinds: one line for all rows, a line per row, a line per group of consecutive rows
(batches, frames), or lines that repeat with every batch. So no operand is copied or expanded in memory, whatever its
strides. A program takes a few rows of a stretch of channels: a line that the rows share is loaded once, and all loads
are issued before the first use.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.broadcast import check_operands, formless, per_token, placed
from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    follow_the_kernel_ahead,
    load_operand_tile,
    load_tile,
    operand_line,
    store_tile,
    vector_width,
)
from kda_runtime.tuned_table import Table

# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many channels as the program's threads hold in one 16-byte vector of x each."""

    warps: int
    rows: int = 1
    """Rows of a tile. A thread has a vector of each, so this is also its number of loads in flight."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    load: str = ""
    """Cache modifier of the loads of x, or `evict_first`."""


TUNED = Table(__file__, "scale_shift", Config)
"""Tuned configurations, chosen by `elements` (of x)."""


# --- kernel


@triton.jit
def to_common(value, other):
    """`value` in the dtype in which Triton combines it with `other`: float32 or else float16 if either is that."""
    if value.dtype == tl.float32 or other.dtype == tl.float32:
        return value.to(tl.float32)
    elif value.dtype == tl.float16 or other.dtype == tl.float16:
        return value.to(tl.float16)
    else:
        return value


@triton.jit
def as_upstream(value, factor, offset, CONSTANT: tl.constexpr):
    """`value * (CONSTANT + factor) + offset` of 16-bit or float32 operands, as the compiler rounds upstream's kernel.

    The compiler fuses product and sum into one multiply-add where both have one dtype. That is written out here, so
    that it does not depend on the surrounding code and Triton's interpreter does it, too. A 16-bit sum or product is
    computed through float32: the result is the same, and the compiler makes one instruction of it.
    """
    constant = tl.cast(CONSTANT, factor.dtype).to(tl.float32)
    factor = (constant + factor.to(tl.float32)).to(factor.dtype)
    value, factor = to_common(value, factor), to_common(factor, value)
    offset = to_common(offset, value)
    if offset.dtype == value.dtype:
        return tl.fma(value, factor, offset)
    else:
        product = to_common((value.to(tl.float32) * factor.to(tl.float32)).to(value.dtype), offset)
        return (product.to(tl.float32) + offset.to(tl.float32)).to(offset.dtype)


@triton.jit
def scale_shift_kernel(
    y,  # [B * L, C]
    x,  # [B * L, C]
    scale,
    shift,
    # None where the form needs none, or where the rows fill the programs: 20 ns less for the host, and a constant here.
    rows,  # B * L
    scale_group,
    shift_group,
    # The forms' strides and scale_constant are fixed per model.
    SCALE: tl.constexpr,  # a `broadcast.Form`
    SHIFT: tl.constexpr,
    CONSTANT: tl.constexpr,
    SCALARS: tl.constexpr,  # both operands are what upstream calls scalars
    EXACT: tl.constexpr,  # upstream's bits
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
    LOAD: tl.constexpr,
):
    """One program: up to ROWS rows, up to COLS of their channels."""
    PARTS: tl.constexpr = (C + COLS - 1) // COLS
    PARTIAL: tl.constexpr = C % COLS != 0
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = None if rows is None else row < rows
    first = row.to(tl.int64) * C  # [ROWS, 1]

    follow_the_kernel_ahead(PDL)

    value = load_tile(x + first, col, inside, C, PARTIAL, LOAD)
    shift_line = operand_line(shift, row, shift_group, SHIFT)
    offset = load_operand_tile(shift_line, col, inside, C, PARTIAL, SHIFT)
    if not EXACT:
        offset = offset.to(tl.float32)
    scale_line = operand_line(scale, row, scale_group, SCALE)
    factor = load_operand_tile(scale_line, col, inside, C, PARTIAL, SCALE)
    if EXACT:
        result = as_upstream(value, factor, offset, CONSTANT).to(y.dtype.element_ty)
    else:
        factor = factor.to(tl.float32)
        # Not `widen`: it would save 20 of 137 instructions, but put a load after the first wait where rows are masked.
        result = (value.to(tl.float32) * (CONSTANT + factor) + offset).to(y.dtype.element_ty)
    if SCALARS:
        # Decided on the GPU; upstream asks the host. So nothing synchronises, and a CUDA graph stays valid.
        zero = (factor.to(tl.float32) == 0.0) & (offset.to(tl.float32) == 0.0)
        result = tl.where(zero, value, result)
    store_tile(y + first, result, col, inside, C, PARTIAL, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    x: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    scale_constant: float

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Scale and shift by name. If scale has 4 dimensions, a shift of x's size is one line per row in any shape."""
        shift = self.shift
        if self.scale.dim() == 4 and shift.numel() == self.x.numel():
            shift = shift.reshape(self.x.shape)
        return {"scale": self.scale, "shift": shift}

    @property
    def scalars(self) -> bool:
        """Whether both operands are scalars by upstream's rule: 0-D, or one element in 1-D."""
        return all(operand.dim() < 2 and operand.numel() == 1 for operand in (self.scale, self.shift))


def plan(call: Call, exact: bool = False) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, channels = x.shape
    scale, shift = (placed(operand, batch, tokens) for operand in call.operands.values())
    major = capability(x)
    config = TUNED.select(major, elements=x.numel())
    rows, cols = block(config, channels, x.itemsize)
    pdl = config.pdl and pdl_works(scale_shift_kernel, major)
    return Launch.make(
        scale_shift_kernel,
        (triton.cdiv(batch * tokens, rows) * triton.cdiv(channels, cols),),
        x,
        *call[:3],
        batch * tokens if batch * tokens % rows else None,
        scale.group,
        shift.group,
        SCALE=scale.form,
        SHIFT=shift.form,
        CONSTANT=float(call.scale_constant),
        SCALARS=call.scalars,
        EXACT=exact,
        C=channels,
        ROWS=rows,
        COLS=cols,
        PDL=pdl,
        STORE=config.store,
        LOAD=config.load,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def exact_plan(call: Call) -> Launch:
    """The same for upstream's bits."""
    return plan(call, exact=True)


def block(config: Config, channels: int, item_size: int) -> tuple[int, int]:
    """Rows and channels of a program; rows of few channels are taken several at a time, so that no thread idles."""
    tile = vector_width(config.warps, item_size)
    cols = min(tile, triton.next_power_of_2(channels))
    return config.rows * tile // cols, cols


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.x.dim() == 3, "x", "three dimensions [B, L, C]", list(call.x.shape))
    check_operands(expect, call.operands, call.x.shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if not call.x.is_contiguous():
        return f"x is not contiguous, its strides are {call.x.stride()}"
    if call.operands["shift"].shape != call.shift.shape and not call.shift.is_contiguous():
        return f"shift has shape {list(call.shift.shape)} and gaps; only a copy brings it to x's shape"
    return unfit(given(call)) or formless(call.operands, *call.x.shape[:2])


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x, tokens = call.x, call.x.shape[1]
    wide = torch.float32
    for tensor in call[:3]:
        wide = torch.promote_types(wide, tensor.dtype)
    scale, shift = (per_token(operand.to(wide), tokens) for operand in call.operands.values())
    y = (x.to(wide) * (call.scale_constant + scale) + shift).to(x.dtype)
    if call.scalars:
        y = torch.where((scale == 0) & (shift == 0), x, y)
    return y.contiguous()


def _exact_plain(call: Call) -> torch.Tensor:
    """Upstream's chain for devices without Triton: each operation rounds to the wider dtype of its operands."""
    x, tokens = call.x, call.x.shape[1]
    scale, shift = (per_token(operand, tokens) for operand in call.operands.values())
    y = (x * (call.scale_constant + scale) + shift).to(x.dtype)
    if call.scalars:
        y = torch.where((scale == 0) & (shift == 0), x, y)
    return y.contiguous()


# --- public function

OP = Op(
    "fuse_scale_shift_kernel",
    Call,
    kernel=scale_shift_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("x",),
    contiguous=True,
    exact=(exact_plan, _exact_plain),
)


@OP.public
def fuse_scale_shift_kernel(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    scale_constant: float = 1.0,
    block_l: int = 128,  # noqa: ARG001
    block_c: int = 128,  # noqa: ARG001
) -> torch.Tensor:
    """Scale and shift x.

    Args:
        x: [B, L, C], contiguous; float16, bfloat16 or float32.
        scale: 0-D, [C], [B, C], [B, L, C] or [B, F, 1, C] with F frames of L / F tokens; any size may be 1 instead,
            strides and dtype are free.
        shift: likewise. Beside a scale of four dimensions also any shape of B * L * C elements, as one line per token.
        scale_constant: added to scale.
        block_l: upstream's tile; accepted and not used.
        block_c: likewise.

    Returns:
        [B, L, C], contiguous, x's dtype. Where scale and shift are scalars (0-D or [1]) and both zero, a copy of x.

    Other dtypes, strides and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return OP.call(x, scale, shift, scale_constant)
