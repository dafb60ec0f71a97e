"""Which configurations may be chosen: `kda tune rounded_rmsnorm_modulate` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.rounded_rmsnorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps, stores and rows of a program; then all loads early, and programmatic dependent launch off."""
    for warps, ahead, load, store in product((1, 2, 4), (False, True), ("", ".cg"), ("", ".cs")):
        yield Config(warps, ahead=ahead, load=load, store=store)
    for warps, rows, load in product((2, 4), (2, 4, 8), ("", ".cg")):
        yield Config(warps, rows=rows, load=load)
    yield Config(4, early=True)
    yield Config(4, pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 4_000_000}, {})),)
