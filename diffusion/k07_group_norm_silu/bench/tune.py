"""Which configurations may be chosen: `kda tune group_norm_silu` times them all."""

from collections.abc import Iterator
from itertools import product

from diffusion.k07_group_norm_silu.solution.tuning import TUNED, Config
from kda_core.tune import Sweep

WAVES_MB = (0, 8, 16, 24)


def grid() -> Iterator[Config]:
    """Every method with its cuts; orders, hints and waiting late only beside the cuts that they are likely to help."""
    yield from (Config("whole", warps) for warps in (16, 8, 4))
    yield from (Config("cluster", warps, blocks=blocks) for warps, blocks in product((8, 16), (8, 16)))
    # One wave, small and large parts: for tensors within the L2.
    yield from (Config("stretch", warps, tiles) for warps, tiles in product((4, 8), (4, 2, 8)))
    yield from (Config("stretch", 4, 4, early=False), Config("stretch", 4, 4, pdl=False), Config("stretch", 16, 4))
    # Waves, and orders of one wave: for tensors beyond it.
    for wave_mb in WAVES_MB:
        yield Config("stretch", 8, 8, wave_mb, store=".cs")
        yield Config("stretch", 8, 4, wave_mb, store=".cs")
        yield Config("stretch", 16, 4, wave_mb, store=".cs")
        yield Config("stretch", 8, 8, wave_mb, store=".cs", hints=True)
    yield from (Config("stretch", 8, 8, wave_mb, store=".cs", reverse=False) for wave_mb in (0, 16))
    yield Config("stretch", 8, 8, 16, store=".cs", early=False)


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
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
