"""Which configurations may be chosen: `kda tune qknorm_rope` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.qknorm_rope import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps, tiles, stores, and programmatic dependent launch or not; then all loads early, and a flat row of heads."""
    for (warps, tiles), store, pdl in product(
        ((4, 1), (4, 2), (4, 3), (4, 4), (2, 1), (2, 4), (1, 4), (8, 1), (8, 2)), ("", ".cs"), (True, False)
    ):
        yield Config(warps, tiles, pdl, store)
    for (warps, tiles), store in product(((4, 2), (4, 3), (2, 4), (1, 4), (8, 2)), ("", ".cs")):
        yield Config(warps, tiles, True, store, early=True)
    for warps, store in product((2, 4, 8), ("", ".cs")):
        yield Config(warps, 1, True, store, flat=True)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"rows": 16_384}, {})),)
