"""Which configurations may be chosen: `kda tune group_norm_silu_pad` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.pixels import TUNED, Config

SMALL, MEDIUM = 8 * 2**20, 48 * 2**20
"""Bytes of an output: of few programs; that the L2 holds beside its input."""


def grid() -> Iterator[Config]:
    """Warps, vectors of a thread in both kernels, programs; other stores and no PDL for some of them."""
    for warps, vectors, tiles in product((4, 8), (1, 2, 4), (2, 4, 8)):
        yield Config(warps, vectors, tiles)
    for stretches, tiles in product((528, 2112), (2, 4, 8)):
        yield Config(4, 2, tiles, stretches)
    for warps, vectors in product((4, 8), (1, 2, 4)):
        yield Config(warps, vectors, 4, store=".cs")
    yield Config(4, 2, 4, pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": SMALL}, {"bytes": MEDIUM}, {})),)
