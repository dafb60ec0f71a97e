"""Which configurations may be chosen: `kda tune rounded_rmsnorm_modulate` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.rounded_rmsnorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps of a row, stores, and all loads early or not; then programmatic dependent launch off."""
    for warps, store, early in product((1, 2, 4), ("", ".cs"), (False, True)):
        yield Config(warps, store=store, early=early)
    yield Config(2, pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 4_000_000}, {})),)
