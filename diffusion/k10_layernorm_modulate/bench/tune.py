"""Which configurations may be chosen: `kda tune layernorm_modulate` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.layernorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Rows of a block, warps at the same time, and PDL."""
    for warps, held in product((4, 1, 2, 8), (8, 12, 16)):
        if held >= warps:
            yield Config(warps, held)
    yield Config(pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"rows": 1024}, {}), in_graphs=True),)
