"""What both ops share: configurations, how work is cut, where operands lie, and what neither kernel covers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import capability, given, output_strides, pdl_works, unfit
from kda_runtime.triton_rows import VECTOR_BYTES, even_share

LARGEST_HEAD = 4096
"""Largest head, in elements; it lies in the registers of one program, 32 elements a thread at 4 warps."""
LARGEST_BATCH = 65_535
"""Largest batch: batches are the second dimension of the grid, and this is CUDA's limit on it."""


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
    load: str = ""
    """Cache modifier of the loads of x, or `evict_first`."""


class Cut(NamedTuple):
    """A configuration applied to a shape: a constant of the kernel."""

    warps: int
    heads: int
    """Heads of a tile, a power of two."""
    tiles: int
    tokens: int
    """Tokens of a program."""
    parts: int
    """Programs that share the heads of a token."""
    pdl: bool
    store: str
    load: str


def cut(config: Config, kernel: object, x: torch.Tensor, tokens: int, heads: int, width: int) -> Cut:
    """How many programs a call takes and what each does.

    `width` is a power of two: the elements of a head that threads hold with one vector each, of x's dtype.
    """
    vector = VECTOR_BYTES // x.itemsize
    # No more warps than one tile of all heads keeps busy.
    warps = min(config.warps, max(triton.next_power_of_2(heads) * width // (32 * vector), 1))
    tile = max(warps * 32 * vector // width, 1)
    tiles = even_share(triton.cdiv(heads, tile), config.tiles)
    return Cut(
        warps=warps,
        heads=tile,
        tiles=tiles,
        # A divisor, so that no program needs to know how many tokens there are.
        tokens=next(n for n in range(config.tokens, 0, -1) if tokens % n == 0),
        parts=triton.cdiv(heads, tile * tiles),
        pdl=config.pdl and pdl_works(kernel, capability(x)),
        store=config.store,
        load=config.load,
    )


class Strides(NamedTuple):
    """Where an operand's elements lie: a constant of the kernel.

    Strides are fixed per model. As constants they cost the host nothing at launch (20 ns an argument).
    """

    token: int
    head: int = 0
    column: int = 1
    jump: int = 0
    """Elements from the end of a batch to the next one: 0 for contiguous tensors, whatever the number of tokens."""


def strides(batch: int, tokens: int, by_batch: int, by_token: int, by_head: int) -> Strides:
    """The strides of an operand with so many batches and tokens."""
    return Strides(by_token, by_head, jump=by_batch - tokens * by_token if batch > 1 else 0)


@triton.jit
def first_of_program(CUT: tl.constexpr):
    """A program's batch, its first token, that token counted through all batches (64 bits each), and its first head."""
    batch = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // CUT.parts).to(tl.int64) * CUT.tokens
    tokens = (tl.num_programs(0) // CUT.parts).to(tl.int64) * CUT.tokens
    return batch, token, batch * tokens + token, tl.program_id(0) % CUT.parts * (CUT.heads * CUT.tiles)


def uncovered(call: Any, batch: int, head: int) -> str | None:
    """Why neither kernel can take the call's tensors on any device, or None."""
    x = call.x
    if x.stride(-1) != 1 or output_strides(x)[-1] != 1:
        return f"x has stride {x.stride(-1)} in its last dimension; the kernel takes vectors along it"
    if head > LARGEST_HEAD:
        return f"the head size is {head}; the kernel takes at most {LARGEST_HEAD}"
    if batch > LARGEST_BATCH:
        return f"the batch is {batch}; the kernel takes at most {LARGEST_BATCH}"
    return unfit(given(call))
