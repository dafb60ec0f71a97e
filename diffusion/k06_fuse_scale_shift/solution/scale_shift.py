"""Scale and shift: one Triton kernel for every broadcast form, launched directly.

    y = x * (scale_constant + scale) + shift            [B, L, C], in float32, rounded to x's dtype once

scale and shift broadcast from 0 to 4 dimensions; two scalars (0-D or [1]) that are both zero leave x as it is, whatever
`scale_constant` is.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/scale_shift.py` (Apache-2.0); the code is our
own.

Idea: the op only streams. x is taken as B * L rows, and where an operand's line lies for a row is one of four forms
(`Form`), a constant of the compiled kernel: the same line for all rows, a line per row, a line per group of consecutive
rows (batches, frames), or lines that repeat with every batch. So no operand is copied or expanded in memory, whatever
its strides. A program takes a few rows of a stretch of channels: a line that the rows share is loaded once, and all
loads are issued before the first use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.calls import capability, check_tensors, elsewhere, given, pdl_works, register, unfit
from kda_core.errors import expecting
from kda_core.launch import MISS, Launch, Plans, is_tracing
from kda_core.rows import (
    check_operands,
    form,
    formless,
    load_operand_tile,
    load_tile,
    operand_line,
    per_token,
    store_tile,
    vector_width,
)
from kda_core.tuning import Table

OP = "fuse_scale_shift_kernel"


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many channels as the program's threads hold in one 16-byte vector of x each."""

    warps: int
    rows: int = 1
    """Rows of a tile: a thread has a vector of each, so the loads in flight."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "scale_shift", Config)
"""Features: `elements` (of x)."""


# --- kernel


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
    # Strides and scale_constant are fixed per model.
    SCALE_FORM: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_ACROSS: tl.constexpr,
    SHIFT_FORM: tl.constexpr,
    SHIFT_STRIDE: tl.constexpr,
    SHIFT_ACROSS: tl.constexpr,
    CONSTANT: tl.constexpr,
    SCALARS: tl.constexpr,  # both operands are what upstream calls scalars
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows, up to COLS of their channels."""
    PARTS: tl.constexpr = (C + COLS - 1) // COLS
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = None if rows is None else row < rows
    first = row.to(tl.int64) * C  # [ROWS, 1]

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    value = load_tile(x + first, col, inside, C, C % COLS != 0, "")
    shift_line = operand_line(shift, row, shift_group, SHIFT_FORM, SHIFT_STRIDE)
    offset = load_operand_tile(shift_line, col, inside, C, C % COLS != 0, SHIFT_FORM, SHIFT_ACROSS).to(tl.float32)
    scale_line = operand_line(scale, row, scale_group, SCALE_FORM, SCALE_STRIDE)
    factor = load_operand_tile(scale_line, col, inside, C, C % COLS != 0, SCALE_FORM, SCALE_ACROSS).to(tl.float32)

    # Not `kda_core.rows.widen`: of 137 instructions 20 less, but where rows are masked a load behind the first wait.
    result = (value.to(tl.float32) * (CONSTANT + factor) + offset).to(y.dtype.element_ty)
    if SCALARS:
        # Decided here, where upstream asks the host: no synchronisation, and a CUDA graph stays valid.
        result = tl.where((factor == 0.0) & (offset == 0.0), value, result)
    store_tile(y + first, result, col, inside, C, C % COLS != 0, STORE)


# --- launcher


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    x: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    scale_constant: float = 1.0
    tensors = property(given)

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Both by name. Beside a scale of frames, a shift of x's size is one line per row, whatever its shape."""
        shift = self.shift
        if self.scale.dim() == 4 and shift.numel() == self.x.numel():
            shift = shift.reshape(self.x.shape)
        return {"scale": self.scale, "shift": shift}

    @property
    def scalars(self) -> bool:
        """Whether both operands are scalars by upstream's rule: 0-D, or one element in 1-D."""
        return all(operand.dim() < 2 and operand.numel() == 1 for operand in (self.scale, self.shift))


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, channels = x.shape
    scale, shift = (form(operand, batch, tokens) for operand in call.operands.values())
    assert scale is not None, "plan() is for covered calls"
    assert shift is not None, "plan() is for covered calls"
    major = capability(x)
    config = TUNED.select(major, elements=x.numel())
    rows, cols = block(config, channels, x.element_size())
    pdl = config.pdl and pdl_works(scale_shift_kernel, major)
    return Launch.make(
        scale_shift_kernel,
        (triton.cdiv(batch * tokens, rows) * triton.cdiv(channels, cols),),
        x,
        x,
        call.scale,
        call.shift,
        batch * tokens if batch * tokens % rows else None,
        scale.group,
        shift.group,
        **scale.constants("SCALE"),
        **shift.constants("SHIFT"),
        CONSTANT=float(call.scale_constant),
        SCALARS=call.scalars,
        C=channels,
        ROWS=rows,
        COLS=cols,
        PDL=pdl,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def block(config: Config, channels: int, item_size: int) -> tuple[int, int]:
    """Rows and channels of a program; rows of few channels are taken several at a time, so that no thread idles."""
    tile = vector_width(config.warps, item_size)
    cols = min(tile, triton.next_power_of_2(channels))
    return config.rows * tile // cols, cols


def launches(_op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(**inputs, **scalars)
    _check(call)
    return [] if _uncovered(call) else [plan(call)]


def _call(*args: Any, **kwargs: Any) -> Call:
    """The call with these arguments; upstream's tiles are left out."""
    named = {name: value for name, value in kwargs.items() if name not in ("block_l", "block_c")}
    return Call(*args[: len(Call._fields)], **named)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(OP)
    check_tensors(OP, {"x": call.x, "scale": call.scale, "shift": call.shift})
    expect(call.x.dim() == 3, "x", "three dimensions [B, L, C]", list(call.x.shape))
    check_operands(OP, call.operands, call.x.shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if not call.x.is_contiguous():
        return f"x is not contiguous, its strides are {call.x.stride()}"
    if call.operands["shift"].shape != call.shift.shape and not call.shift.is_contiguous():
        return f"shift has shape {list(call.shift.shape)} and gaps; only a copy brings it to x's shape"
    return unfit(call.tensors) or formless(call.operands, *call.x.shape[:2])


def why_not(_op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = _call(*args, **kwargs)
    _check(call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    return elsewhere(call.x, scale_shift_kernel) or _uncovered(call)


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
    """A tensor of x's shape, dtype and device, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_SCHEMA = "(Tensor x, Tensor scale, Tensor shift, float scale_constant=1.0) -> Tensor"
_op = register(__name__, OP, _SCHEMA, _impl, _fake)


# --- public function


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
    if not is_dynamo_compiling():
        for entry in _PLANS.hot:
            result = entry(x, scale, shift, scale_constant)
            if result is not MISS:
                return result
    call = Call(x, scale, shift, scale_constant)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _op(*call)
    return _run(call)
