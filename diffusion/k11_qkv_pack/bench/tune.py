"""Which configurations may be chosen: `kda tune qkv_pack` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.qkv_pack import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps and tiles, stores, and all loads early or not; then programmatic dependent launch off."""
    for (warps, tiles), store, early in product(
        ((4, 1), (4, 2), (4, 3), (2, 3), (2, 6), (1, 6), (8, 1), (8, 2)), ("", ".cs"), (False, True)
    ):
        if tiles > 1 or not early:
            yield Config(warps, tiles, store=store, early=early)
    for (warps, tiles), store in product(((4, 3), (2, 6)), ("", ".cs")):
        yield Config(warps, tiles, pdl=False, store=store, early=True)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 40_000_000}, {})),)
