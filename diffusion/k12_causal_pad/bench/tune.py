"""Which configurations may be chosen: `kda tune causal_pad` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.causal_pad import TUNED, Config

SMALL = 32 * 2**20
"""Bytes of an output that the L2 holds beside its input."""


def grid() -> Iterator[Config]:
    """Warps, pairs of a thread, channels and begin of a program; other stores and no PDL for some of them."""
    for warps, channels, items in product((4, 8), (1, 2, 4, 8), (1, 2, 4, 8)):
        if warps == 4 or channels * items in (4, 8):
            yield Config(warps, items, store=".cs", channels=channels)
        if channels == 1 and items > 1:
            yield Config(warps, items, store=".cs", align=True)
    for channels, items in product((1, 4), (2, 4)):
        yield Config(4, items, channels=channels)
        yield Config(4, items, pdl=False, store=".cs", channels=channels)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": SMALL}, {})),)
