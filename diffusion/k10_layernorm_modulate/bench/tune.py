"""Which configurations may be chosen: `kda tune layernorm_modulate` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.layernorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps of a row, rows of a block, warps at the same time, when a warp loads its next row, and PDL."""
    for rows, held in product((4, 1), (12, 8, 16)):
        for following in ("once", "after", "before") if held < 16 else ("once", "after"):  # else too few registers
            yield Config(rows, 1, following, held)
    for following, held in (("once", 16), ("once", 24), ("once", 32), ("after", 16), ("after", 24), ("before", 16)):
        yield Config(1, 2, following, held)
    yield Config(pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"rows": 1024}, {}), in_graphs=True),)
