"""Which configurations may be chosen: `kda tune group_norm_silu` times them all."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

from diffusion.k07_group_norm_silu.solution.tuning import CLUSTER_VECTORS, TUNED, VECTOR_BYTES, WHOLE_BYTES, Config
from kda_core.tune import Sweep
from kda_core.tuning import Features

WAVES_MB = (0, 8, 16, 24)
WHOLE_TILES = 16
"""whole: vectors of a thread, 64 registers of it; a group that has more for so many warps gets more warps."""
SMALL_GROUP = 2**15
"""Up to so many bytes of a group no second launch, and no waiting for other blocks, is made up for."""
WITHIN_L2 = 40_000_000
"""Up to so many bytes of x, x and y together are about what the L2 cache holds: plain stores, one wave."""
BEYOND_L2 = 12_000_000
"""From so many bytes of x on, streaming stores and waves may help."""


def grid() -> Iterator[Config]:
    """Every method with its cuts; orders, hints and waiting late only beside the cuts that they are likely to help."""
    yield from (Config("whole", warps) for warps in (16, 8, 4))
    yield from (Config("cluster", warps, blocks=blocks) for warps, blocks in product((8, 16), (8, 16)))
    yield Config("cluster", 16, blocks=4)  # 32 groups are 128 blocks, about one to a multiprocessor
    # One wave, small and large parts.
    yield from (Config("stretch", warps, tiles) for warps, tiles in product((4, 8), (4, 2, 8)))
    yield from (Config("stretch", 4, 4, early=False), Config("stretch", 4, 4, pdl=False), Config("stretch", 16, 4))
    # Waves, and orders of one wave.
    for wave_mb in WAVES_MB:
        yield Config("stretch", 8, 8, wave_mb, store=".cs")
        yield Config("stretch", 16, 4, wave_mb, store=".cs")
    for wave_mb in (0, 16):
        yield Config("stretch", 8, 4, wave_mb, store=".cs")
        yield Config("stretch", 8, 8, wave_mb, store=".cs", reverse=False)
    yield Config("stretch", 8, 8, 16, store=".cs", hints=True)
    yield Config("stretch", 8, 8, 16, store=".cs", early=False)


def applies(config: Config, features: Features) -> bool:
    """Each method where it takes the call itself and can win."""
    group, whole_tensor = features["group_bytes"], features["bytes"]
    per_tile = config.warps * 32 * VECTOR_BYTES  # bytes that a program's threads hold with a vector each
    if config.method == "whole":
        return group <= min(WHOLE_TILES * per_tile, WHOLE_BYTES)
    if group <= SMALL_GROUP:
        return False
    if config.method == "cluster":
        return group <= config.blocks * CLUSTER_VECTORS * 32 * VECTOR_BYTES and find_spec("cutlass") is not None
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
