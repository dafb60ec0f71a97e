"""Operands that broadcast to the rows of x: their shapes and strides, as a kernel of `triton_rows` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from kda_runtime.checks import Expect


def row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row of x [..., columns] to the next, None where there is no one such number."""
    outer = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if not outer:
        return x.shape[-1]
    if any(step != inner[0] * inner[1] for (_, step), inner in pairwise(outer)):
        return None
    return outer[-1][1]


class Form(NamedTuple):
    """Where the line of an operand lies for row r of x: a constant of the kernel, so that nothing is copied."""

    name: str = "one"
    """Number of the line: 0 (`one`), r (`rows`), r // group (`groups`) or r % group (`cycle`). Times `stride`."""
    stride: int = 0
    """Elements from line to line."""
    across: bool = True
    """True: a line has all channels, one after the other. False: it has one value for all channels."""


class Placed(NamedTuple):
    """The form of an operand, and the number of rows that it may need."""

    form: Form
    group: int | None = None
    """Rows, for `groups` and `cycle`; an argument of the kernel, because it changes with the number of tokens."""


def placed(operand: torch.Tensor, batch: int, tokens: int) -> Placed | None:
    """Where the lines of an operand lie for x [B, L, C] as B * L rows, None where its strides fit none.

    The operand has 0 to 4 dimensions: a scalar, [C], [B, C], [B, L, C] or [B, F, 1, C], F frames of L / F tokens. Any
    size may be 1 instead. Channels must lie one after the other, or be one value.
    """

    def step(dim: int) -> int:
        return operand.stride(dim) if operand.shape[dim] > 1 else 0

    rank = operand.dim()
    channel = step(-1) if rank else 0
    if channel not in (0, 1):
        return None
    across = channel == 1
    by_batch = step(0) if rank > 1 else 0
    lines = operand.shape[1] if rank > 2 else 1
    by_line = step(1) if rank > 2 else 0
    each = tokens // lines if rank == 4 else 1  # tokens that share a line
    if by_line == 0:
        return Placed(Form("groups", by_batch, across), tokens) if by_batch else Placed(Form("one", 0, across))
    if batch > 1 and by_batch != lines * by_line:
        return Placed(Form("cycle", by_line, across), tokens) if by_batch == 0 and each == 1 else None
    return Placed(Form("rows", by_line, across)) if each == 1 else Placed(Form("groups", by_line, across), each)


def check_operands(expect: Expect, operands: Mapping[str, torch.Tensor], shape: Sequence[int]) -> None:
    """Raise ValueError for an operand whose shape `placed` has no meaning for, x being of shape [B, L, C]."""
    batch, tokens, channels = shape
    for name, operand in operands.items():
        sizes = list(operand.shape)
        expect(len(sizes) <= 4, name, "at most four dimensions", sizes)
        frames = sizes[1] if len(sizes) == 4 else 1
        expect(frames > 0 and tokens % frames == 0, name, f"frames that divide the {tokens} tokens of x", frames)
        wholes = ((), (channels,), (batch, channels), (batch, tokens, channels), (batch, frames, 1, channels))
        whole = wholes[len(sizes)]
        broadcasts = all(size in (1, full) for size, full in zip(sizes, whole, strict=True))
        expect(broadcasts, name, f"a shape that broadcasts to {list(whole)}", sizes)


def formless(operands: Mapping[str, torch.Tensor], batch: int, tokens: int) -> str | None:
    """Why the kernel cannot read one of these operands where it lies, or None."""
    for name, operand in operands.items():
        if placed(operand, batch, tokens) is None:
            return f"{name} has shape {list(operand.shape)} and strides {operand.stride()}, for which there is no form"
    return None


def per_token(operand: torch.Tensor, tokens: int) -> torch.Tensor:
    """The operand as a tensor that broadcasts with x [B, L, C], for plain PyTorch paths: frames are repeated."""
    if operand.dim() == 4:
        return operand.squeeze(2).repeat_interleave(tokens // operand.shape[1], dim=1)
    return operand.unsqueeze(1) if operand.dim() == 2 else operand
