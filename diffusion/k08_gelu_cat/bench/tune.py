"""Which configurations may be chosen: `kda tune gelu_cat` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.gelu_tanh_cat import TUNED, Config

CUTS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2))
"""Tiles and rows of a program."""


def grid() -> Iterator[Config]:
    """Warps, tiles, rows and stores; the library's tanh and launches without PDL for a few of them."""
    for warps, (tiles, rows), store in product((4, 8), CUTS, ("", ".cs")):
        yield Config(warps, tiles, rows, store=store)
        if (tiles, rows) in ((2, 1), (4, 1)):
            yield Config(warps, tiles, rows, library=True, store=store)
        if (warps, rows) == (4, 1) and tiles != 3:
            yield Config(warps, tiles, rows, pdl=False, store=store)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({},)),)
