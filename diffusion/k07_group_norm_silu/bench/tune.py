"""Which configurations may be chosen: `kda tune group_norm_silu` times them all."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

from kda_runtime.triton_rows import VECTOR_BYTES
from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.plans import CLUSTER_TILES, H200_MULTIPROCESSORS, TUNED, WHOLE_BYTES, Config

FLOWS = {(4, 4, 32): 256, (8, 4, 32): 512, (4, 6, 24): 256, (8, 6, 24): 1024, (8, 8, 16): 1024}
"""flow: (warps and tiles of a program, warps of a multiprocessor) -> most parts of a bfloat16 group without spills."""
RINGS = (
    (2, 8, 16, 3, 2),
    (4, 8, 16, 3, 2),
    (4, 9, 16, 3, 2),
    (4, 6, 20, 3, 2),
    (4, 4, 24, 4, 3),
    (4, 12, 12, 3, 2),
    (8, 7, 16, 4, 3),
    (4, 8, 12, 4, 3),
    (8, 4, 16, 7, 5),
)
"""ring: warps and tiles of a block, warps of a multiprocessor, parts of a ring (`stages`), and `ahead` of these."""
WHOLE_TILES = 16
"""whole: most vectors of a thread, which take 64 registers; a group that needs more of them gets more warps."""
SMALL_GROUP = 2**15
"""Bytes of a group up to which neither a second launch nor more than a few blocks pay off."""
FEW_BLOCKS = 4
"""cluster: blocks for small groups, which with one block each leave most multiprocessors idle."""
WITHIN_L2 = 40_000_000
"""Bytes of x up to which x and y together are about what the L2 cache holds: plain stores may help."""
BEYOND_L2 = 12_000_000
"""Bytes of x above which streaming stores may help, and writing while statistics are still computed."""


def grid() -> Iterator[Config]:
    """Every method with its cuts; orders, hints and waiting late only beside the cuts that they are likely to help."""
    yield from (Config("whole", warps) for warps in (16, 8, 4))
    yield from (Config("cluster", warps, blocks=blocks) for warps, blocks in product((8, 16), (8, 16)))
    yield from (Config("cluster", warps, blocks=FEW_BLOCKS) for warps in (4, 8))
    # Small and large parts.
    yield from (Config("stretch", warps, tiles) for warps, tiles in ((4, 4), (4, 2), (4, 8), (8, 4), (8, 2)))
    yield Config("stretch", 4, 4, early=False)
    yield from (Config("stretch", 8, tiles, store=".cs") for tiles in (8, 4))
    yield Config("stretch", 8, 8, store=".cs", hints=True)
    for (warps, tiles, resident), hints in product(FLOWS, (False, True)):
        yield Config("flow", warps, tiles, resident=resident, store=".cs", hints=hints)
    for ahead_mb, hints in product((0, 12), (False, True)):
        yield Config("flow", 4, 4, ahead_mb, resident=32, store=".cs", hints=hints)
        yield Config("flow", 8, 6, ahead_mb, store=".cs", hints=hints)
    for (warps, tiles, resident, stages, ahead), store in product(RINGS, ("", ".cs")):
        yield Config("ring", warps, tiles, resident=resident, stages=stages, ahead=ahead, store=store)
    yield Config("flow", 8, 6, hints=True)
    yield Config("flow", 8, 6, store=".cs", hints=True, reverse=False)


def applies(config: Config, features: Features) -> bool:
    """Each method where it takes the call itself and can win."""
    group, whole_tensor = features["group_bytes"], features["bytes"]
    per_tile = config.warps * 32 * VECTOR_BYTES  # bytes that a program's threads hold with a vector each
    if config.method == "whole":
        return group <= min(WHOLE_TILES * per_tile, WHOLE_BYTES)
    if config.method == "cluster":
        enough = group > SMALL_GROUP or config.blocks == FEW_BLOCKS
        return enough and group <= config.blocks * CLUSTER_TILES * per_tile and find_spec("cutlass") is not None
    if group <= SMALL_GROUP:
        return False
    if config.method == "ring":
        blocks = H200_MULTIPROCESSORS * (config.resident // config.warps)
        return whole_tensor > BEYOND_L2 and group <= config.ahead * blocks * config.tiles * per_tile
    if config.method == "flow":
        parts = FLOWS[config.warps, config.tiles, config.resident]
        return whole_tensor > BEYOND_L2 and group <= parts * config.tiles * per_tile
    return whole_tensor > BEYOND_L2 if config.store else whole_tensor <= WITHIN_L2


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        applies=applies,
        lines=(
            {"group_bytes": 2**15},
            {"group_bytes": 2**16},
            {"group_bytes": 100_000},
            {"bytes": 12_000_000},
            {"bytes": 24_000_000},
            {"bytes": 40_000_000},
            {"bytes": 64_000_000},
            {"bytes": 128_000_000},
            {"bytes": 250_000_000},
            {},
        ),
    ),
)
