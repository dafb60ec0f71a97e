"""How a call is cut into programs and launches, and the table that chooses it (`tuned.toml`)."""

from dataclasses import dataclass
from math import gcd

from kda_core.tuning import Table

VECTOR_BYTES = 16
"""Size of the widest load or store of a thread."""
WHOLE_BYTES = 98304
"""Largest group of one program: 12 tiles of 16 warps, 48 registers a thread; with 14 tiles 24 bytes were spilled."""
EARLY_TILES = 8
"""whole: up to so many tiles, all of weight and bias is loaded before the statistics; with 12 that spilled 24 bytes."""
LATE_AHEAD = 4
"""whole: with more tiles, so many ahead; with 1 or 2 each of the last tiles waits for its own, see docs/dispatch.md."""
MAX_WAVE = 65535
"""stretch: groups of a wave, which are the second dimension of a grid."""
CLUSTER_VECTORS = 128
"""cluster: 32-thread vectors of a block, so 64 KB: 8 to a thread of 16 warps, of which 12 spilled 208 bytes."""
MAX_PARTS = 4096
"""Programs of a group: each of them reads the partial results of all, 8 to a thread at 16 warps."""
MAX_WARPS = 16
MAX_TILES = 8


@dataclass(frozen=True)
class Config:
    """How the work is cut. `warps` and `tiles` are what is aimed at: small groups get fewer, very large ones more."""

    method: str
    """`whole`: a program holds a group. `stretch`: statistics and output in launches of their own. `cluster`: a group
    in the shared memory of a cluster of blocks (CuTe DSL)."""
    warps: int = 8
    tiles: int = 4
    """stretch: 16-byte vectors of x that a thread has of a part."""
    wave_mb: float = 0
    """stretch: x is worked off in waves of about so many MB, each launch taking the statistics of one and writing the
    output of the one before, so that the second reading finds x in the L2 cache. 0: all of x in one wave."""
    reverse: bool = True
    """stretch: the second reading goes from the end to the beginning."""
    early: bool = True
    """stretch: read x, and take statistics, before waiting for the launch ahead."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    hints: bool = False
    """stretch: evict-last on the first reading of x, evict-first on the second."""
    store: str = ""
    """Cache modifier of the stores."""
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
        shared=gcd(channel, vector),
    )


def wave_groups(groups: int, group_bytes: int, wave_mb: float) -> int:
    """Groups of a wave of about `wave_mb` MB: as equal as whole groups allow; 0 MB is one, if a grid has it."""
    most = min(max(int(wave_mb * 1e6) // group_bytes, 1), MAX_WAVE) if wave_mb else MAX_WAVE
    waves = -(-groups // most)
    return -(-groups // waves)
