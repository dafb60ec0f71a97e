"""Which configurations may be chosen: `kda tune group_norm_silu_pad` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution import pixels, residual

SMALL, MEDIUM, LARGE = 8 * 2**20, 48 * 2**20, 128 * 2**20
"""Bytes of an output: of few programs; that the L2 holds beside its input; of which the L2 holds a part."""


def grid() -> Iterator[pixels.Config]:
    """Warps, vectors of a thread in both kernels, programs; other stores and no PDL for some of them."""
    for stretches, vectors, tiles in product((264, 528, 1056), (1, 2, 4), (2, 4, 8)):
        yield pixels.Config(4, vectors, tiles, stretches)
    for stretches, vectors in product((264, 528), (2, 4)):
        yield pixels.Config(8, vectors, 4, stretches)
        yield pixels.Config(4, vectors, 8, stretches, store=".cs")
    yield pixels.Config(4, 2, 8, 528, pdl=False)


def sums() -> Iterator[residual.Config]:
    """Warps and vectors; other stores for all of them, no PDL for some."""
    for warps, vectors, store in product((2, 4, 8), (1, 2, 4), ("", ".cs")):
        yield residual.Config(warps, vectors, store=store)
    yield residual.Config(4, 2, pdl=False)


SWEEPS = (
    Sweep(
        table=pixels.TUNED,
        candidates=tuple(grid()),
        lines=({"bytes": SMALL}, {"bytes": MEDIUM}, {"bytes": LARGE}, {}),
    ),
    Sweep(table=residual.TUNED, candidates=tuple(sums()), lines=({"bytes": MEDIUM}, {})),
)
