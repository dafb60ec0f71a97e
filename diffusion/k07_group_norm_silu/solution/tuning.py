"""How a call is cut into programs and launches, and the table that chooses it (`tuned.toml`)."""

import math
from dataclasses import dataclass

from kda_core.tuning import Table

VECTOR_BYTES = 16
"""Size of the widest load or store of a thread."""
WHOLE_BYTES = 98304
"""Largest group of one program: 12 tiles of 16 warps, 48 registers a thread; with 14 tiles 24 bytes were spilled."""
EARLY_TILES = 8
"""whole: up to so many tiles, all of weight and bias is loaded before the statistics; with 12 that spilled 24 bytes."""
LATE_AHEAD = 4
"""whole: with more tiles, so many ahead; with 1 or 2 each of the last tiles waits for its own, see docs/dispatch.md."""
MAX_SECOND = 65535
"""Programs in the second dimension of a grid, and in the third."""
MAX_TICKETS = 2**30
"""flow, ring: parts of all groups, which are counted in 32 bits."""
PATIENCE = 4096
"""ring: so often a thread looks for statistics, about 0.7 us each, before its block takes them itself."""
FRESH = 1024
"""ring: words that a program of the first launch initialises."""
MAX_SLOTS = 1024
"""flow: words that a program of the first launch initialises, a power of two."""
CLUSTER_TILES = 16
"""cluster: vectors of a thread; 18 spilled 136 bytes."""
CLUSTER_CHANNELS = 2048
"""cluster: channels of a group, 16 KB of shared memory."""
REGISTERS = 65536
"""Of a multiprocessor."""
MAX_PARTS = 4096
"""Programs of a group: each of them reads the partial results of all, 8 to a thread at 16 warps."""
MAX_WARPS = 16
MAX_TILES = 8


@dataclass(frozen=True)
class Config:
    """How the work is cut. `warps` and `tiles` are what is aimed at: small groups get fewer, very large ones more."""

    method: str
    """`whole`: a program holds a group. `stretch`: statistics and output in launches of their own. `flow`: statistics
    of the first parts in a launch, all the rest side by side in another. `ring`: parts stay in shared memory until
    their group has statistics. `cluster`: a group in the registers of a cluster of blocks. These two are CuTe DSL."""
    warps: int = 8
    tiles: int = 4
    """stretch, flow, ring: 16-byte vectors of x that a thread has of a part."""
    ahead_mb: float = 4
    """flow: the statistics are a group and so many MB of x ahead of the output."""
    reverse: bool = True
    """stretch, flow: the second reading goes from the end to the beginning, in flow that of every group."""
    early: bool = True
    """stretch: read x, weight and bias before waiting for the launch ahead."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    hints: bool = False
    """stretch, flow: evict-last on the first reading of x, evict-first on the second."""
    store: str = ""
    """Cache modifier of the stores."""
    resident: int = 24
    """flow, ring: warps that have room on a multiprocessor; more of them have fewer registers, and may spill."""
    stages: int = 3
    """ring: parts of a block in shared memory."""
    ahead: int = 2
    """ring: of these, parts whose statistics are said while the first of them waits; the others are on their way."""
    blocks: int = 8
    """cluster: blocks of a cluster."""


TUNED = Table(__file__, "group_norm_silu", Config)


@dataclass(frozen=True)
class Cut:
    """Tiles of a group of `elements`."""

    warps: int
    block: int
    """Elements of a tile."""
    tiles: int
    """Tiles of a program."""
    parts: int
    """Programs of a group."""
    full: int
    """How many of a program's tiles are sure to lie inside the group."""
    shared: int
    """Elements that are sure to be of one channel: a power of two, at most a vector."""


def cut(elements: int, channel: int, item: int, warps: int, tiles: int) -> Cut:
    """Cut a group of `elements`, `channel` to a channel and `item` bytes each, into parts of about `tiles` tiles.

    `tiles` 0 makes it one part, of as many tiles as it takes.
    """
    vector = VECTOR_BYTES // item
    while tiles and elements > MAX_PARTS * tiles * warps * 32 * vector and (warps < MAX_WARPS or tiles < MAX_TILES):
        warps, tiles = min(2 * warps, MAX_WARPS), min(2 * tiles, MAX_TILES)
    block = min(1 << (elements - 1).bit_length(), warps * 32 * vector)
    needed = -(-elements // block)
    tiles = min(tiles, needed) if tiles else needed
    parts = -(-needed // tiles)
    full = elements // block if parts == 1 else tiles * (elements % (block * tiles) == 0)
    return Cut(
        warps=min(warps, max(1, block // (32 * vector))),
        block=block,
        tiles=tiles,
        parts=parts,
        full=full,
        shared=math.gcd(channel, vector),
    )


def rows_of_programs(count: int) -> tuple[int, int]:
    """The second and third dimension of a grid that has `count` programs in both, or a few more."""
    layers = -(-count // MAX_SECOND)
    return -(-count // layers), layers


def head(parts: int, total: int, part_bytes: int, ahead_mb: float) -> int:
    """flow: parts, of `total` groups of `parts`, whose statistics are taken before the first output."""
    ahead = math.ceil(ahead_mb * 1e6 / part_bytes)
    return min(max(parts + ahead, parts * total // MAX_SLOTS + 1), parts * total)
