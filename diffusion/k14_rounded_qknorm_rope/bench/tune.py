"""Which configurations may be chosen: `kda tune rounded_qknorm_rope` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.rounded_qknorm_rope import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps and tiles, stores, and all loads early or not; then programmatic dependent launch off."""
    for (warps, tiles), store, early in product(
        ((4, 1), (4, 2), (4, 4), (2, 1), (2, 2), (2, 4), (1, 1), (1, 3), (1, 5), (8, 1), (8, 2)),
        ("", ".cs"),
        (False, True),
    ):
        yield Config(warps, tiles, store=store, early=early)
    for warps, tiles in ((4, 1), (2, 2)):
        yield Config(warps, tiles, pdl=False, early=True)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 4_000_000}, {})),)
