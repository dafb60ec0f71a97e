"""Which configurations may be chosen: `kda tune causal_pad` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.causal_pad import TUNED, Config

SMALL = 32 * 2**20
"""Bytes of an output that the L2 holds beside its input."""


def grid() -> Iterator[Config]:
    """Warps, pairs of a thread, stores and where programs begin; launches without PDL for some of them."""
    for warps, items, store, align in product((4, 8), (2, 4, 8, 16), ("", ".cs"), (False, True)):
        yield Config(warps, items, store=store, align=align)
        if not store and items < 8:
            yield Config(warps, items, pdl=False, align=align)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": SMALL}, {})),)
