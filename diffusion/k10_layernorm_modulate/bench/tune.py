"""Which configurations may be chosen: `kda tune layernorm_modulate` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.layernorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps of a row, rows of a block, warps at the same time, when a warp loads its next row, and PDL."""
    for rows, held in product((4, 1), (12, 8, 16)):
        yield Config(rows, 1, "once", held)
    for following, held in (("once", 16), ("once", 24), ("after", 16), ("before", 16)):
        for store in ("", "cs"):
            yield Config(1, 2, following, held, store)
    for following, held in (("after", 20), ("after", 24), ("before", 20)):
        yield Config(1, 2, following, held, "cs")
    for following, held in product(("once", "after", "before"), (24, 32, 48)):
        for store in ("", "cs") if following == "once" else ("",):
            yield Config(1, 4, following, held, store)
    yield Config(pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"rows": 1024}, {}), in_graphs=True),)
