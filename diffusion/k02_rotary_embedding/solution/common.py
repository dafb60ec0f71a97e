"""What both ops share: configurations, how work is cut, and what neither kernel covers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kda_core.calls import output_strides, pdl_works, unfit

VECTOR_BYTES = 16
"""The widest load or store of a thread."""
LARGEST_HEAD = 4096
"""Elements; a head lies in the registers of one program, 32 elements a thread at this size and 4 warps."""
LARGEST_BATCH = 65_535
"""Batches are the second dimension of the grid, which CUDA limits."""


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many heads as the threads of a program hold with one vector of each operand."""

    warps: int
    tiles: int
    """Most tiles of a token per program."""
    tokens: int = 1
    """Most tokens per program; tiles * tokens are the loads of x that a thread has in flight."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""


@dataclass(frozen=True)
class Cut:
    """A configuration applied to a shape; every field but `parts` is a constant of the kernel."""

    warps: int
    heads: int
    """Heads of a tile, a power of two."""
    tiles: int
    tokens: int
    parts: int
    """Programs that share the heads of a token."""
    pdl: bool


def cut(config: Config, kernel: object, major: int, tokens: int, heads: int, width: int, vector: int) -> Cut:
    """How many programs a call takes and what each does.

    `width` is a power of two: a head's elements that one thread in `width / vector` has a vector of.
    """
    # No more warps than one tile of all heads keeps busy.
    useful = max(_power_of_two(heads) * width // (32 * vector), 1)
    warps = min(config.warps, useful)
    tile = max(warps * 32 * vector // width, 1)
    # Even tiles: 4 in at most 3 are 2 + 2, not 3 + 1.
    all_tiles = max(ceil_div(heads, tile), 1)
    tiles = ceil_div(all_tiles, ceil_div(all_tiles, config.tiles))
    return Cut(
        warps=warps,
        heads=tile,
        tiles=tiles,
        # A divisor, so that no program needs to know how many tokens there are.
        tokens=next(n for n in range(config.tokens, 0, -1) if tokens % n == 0),
        parts=ceil_div(heads, tile * tiles),
        pdl=config.pdl and pdl_works(kernel, major),
    )


def jump(batch: int, tokens: int, batch_stride: int, token_stride: int) -> int:
    """What a batch's stride is beyond `tokens` token strides: 0 for contiguous tensors of any length.

    As a constant of the kernel this, unlike the stride itself, does not change with the number of tokens.
    """
    return batch_stride - tokens * token_stride if batch > 1 else 0


def uncovered(tensors: Mapping[str, torch.Tensor], batch: int, head: int) -> str | None:
    """Why neither kernel can take such tensors on any device, or None."""
    x = tensors["x"]
    if x.stride(-1) != 1 or output_strides(x)[-1] != 1:
        return f"x has stride {x.stride(-1)} in its last dimension; the kernel takes vectors along it"
    if head > LARGEST_HEAD:
        return f"the head size is {head}; the kernel takes at most {LARGEST_HEAD}"
    if batch > LARGEST_BATCH:
        return f"the batch is {batch}; the kernel takes at most {LARGEST_BATCH}"
    return unfit(tensors)


def half_block(head: int) -> int:
    """Half a head, padded to a power of two."""
    return _power_of_two(head // 2)


def ceil_div(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
