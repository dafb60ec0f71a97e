"""Which configurations may be chosen: `kda tune per_token_group_quant` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution.group_quant import TUNED, Config
from .grid import OPS, row

ROWS = (1, 16, 128, 1024, 4096)


def candidates() -> Iterator[Config]:
    """Warps, vectors, and how many groups of a row; also with a cache hint, and without PDL."""
    for warps, vectors, beside in product((1, 4, 2, 8), (1, 2), (1, 4, 8, 16)):
        if beside <= warps * vectors * 4:  # 8 threads hold a group of 128
            yield Config(warps, vectors, beside)
    for warps, vectors, beside in product((1, 4, 8), (1, 2), (1, 4)):
        yield Config(warps, vectors, beside, each=8)
    for warps, beside in product((1, 4), (1, 4)):
        yield Config(warps, 1, beside, load=".cg")
        yield Config(warps, 1, beside, load="evict_first")
        yield Config(warps, 1, beside, load="evict_first", each=8)
        yield Config(warps, 1, beside, pdl=False)


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(candidates()),
        lines=(*({"rows": rows} for rows in ROWS), {}),
        rows=tuple(row(op, tokens, 4096) for op, tokens in product(OPS, (16, 256, 1024))),
        in_graphs=True,
    ),
)
