"""Which configurations may be chosen: `kda tune group_norm_silu` times them all."""

from collections.abc import Iterator
from importlib.util import find_spec

from diffusion.k07_group_norm_silu.solution.tuning import CLUSTER_TILES, TUNED, VECTOR_BYTES, WHOLE_BYTES, Config
from kda_core.tune import Sweep
from kda_core.tuning import Features

AHEAD_MB = (4, 0, 12)
WHOLE_TILES = 16
"""whole: vectors of a thread, 64 registers of it; a group that has more for so many warps gets more warps."""
SMALL_GROUP = 2**15
"""Up to so many bytes of a group no second launch is made up for, nor more than a few blocks."""
FEW_BLOCKS = 4
"""cluster: for small groups, which as one block each leave most multiprocessors idle."""
WITHIN_L2 = 40_000_000
"""Up to so many bytes of x, x and y together are about what the L2 cache holds: plain stores."""
BEYOND_L2 = 12_000_000
"""From so many bytes of x on, streaming stores may help, and writing while statistics are still taken."""
FLOW_WORDS = 4
"""flow: parts of a group for each thread of a program, which has to hold their statistics beside its x."""


def grid() -> Iterator[Config]:
    """Every method with its cuts; orders, hints and waiting late only beside the cuts that they are likely to help."""
    yield Config("cluster", 8, blocks=16)
    yield Config("cluster", 16, blocks=16)
    yield Config("stretch", 4, 4, early=False)
    yield Config("stretch", 8, 8, store=".cs")
    yield Config("flow", 4, 4, store=".cs", resident=32)
    yield Config("flow", 8, 8, store=".cs")
    for w, t, r in (
        (4, 4, 20),
        (4, 4, 16),
        (4, 5, 16),
        (4, 6, 16),
        (8, 4, 16),
        (8, 5, 16),
        (8, 6, 16),
        (4, 3, 24),
        (4, 3, 20),
        (4, 2, 28),
        (8, 3, 24),
    ):
        yield Config("hold", w, t, store=".cs", resident=r)
    yield Config("hold", 4, 4, resident=20)


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
    if config.method == "hold":
        return whole_tensor > BEYOND_L2 and group <= 99 * (config.resident // config.warps) * config.tiles * per_tile
    if config.method == "flow":
        return whole_tensor > BEYOND_L2 and group <= FLOW_WORDS * config.warps * 32 * config.tiles * per_tile
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
            {},
        ),
    ),
)
