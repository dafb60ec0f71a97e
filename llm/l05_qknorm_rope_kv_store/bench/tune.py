"""Which configurations may be chosen: `kda tune qknorm_rope_kv_store` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.qknorm_rope_kv_store import TUNED, Config

CUTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2))
"""(warps, tiles)."""


def grid() -> Iterator[Config]:
    """Warps, tiles, stores, and when loads are issued; without programmatic dependent launch only with `.cs` stores."""
    for (warps, tiles), store, early in product(CUTS, ("", ".cs"), (True, False)):
        yield Config(warps, tiles, True, store, early)
    for warps, tiles in CUTS:
        yield Config(warps, tiles, False, ".cs")


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        lines=({"rows": 2048}, {"rows": 16_384}, {"rows": 131_072}, {}),
        in_graphs=True,
    ),
)
