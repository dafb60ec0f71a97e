"""Which configurations may be chosen: `kda tune norm_scale_shift` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.norm_scale_shift import ALL, TUNED, Config

SMALL = 2**22
"""Bytes of x. Its rows are one wave of programs, which wait and compute alone."""
MEDIUM = 12_000_000
"""Up to so many a few waves of programs, with x and y in the L2 cache."""
CACHED = 2**25
"""Up to so many x and y fill the L2 cache: what is streamed past it leaves x there."""


def grid() -> Iterator[Config]:
    """Warps and rows of a program with both orders of loads; then the questions apart from these.

    2 warps would be raised to 4 for every frozen row but those of 1536 columns, which 4 are lowered to 2 for. Two rows
    of 5120 columns take 156 registers, which leaves 3 programs at a time, and 4 with 128.
    """
    for warps, rows in ((4, 1), (8, 1), (4, 2)):
        for ahead, store in ((ALL, ""), (ALL, ".cs"), (1, "")):
            yield Config(warps, rows, ahead=ahead, store=store)
    for warps in (8, 16):
        yield Config(warps, whole=False)
    yield Config(4, pdl=False)
    for rows, store in product((1, 2), ("", ".cs")):
        yield Config(4, rows, load=".cg", store=store)
    for rows, maxnreg in ((1, 80), (1, 96), (2, 128)):
        yield Config(4, rows, maxnreg=maxnreg)


def applies(config: Config, features: Features) -> bool:
    """Small rows ask how fast one program is, not how many there are or what the caches keep of a stream."""
    if features["bytes"] <= SMALL:
        return config.rows == 1 and not config.load and not config.maxnreg
    return config.whole


LINES = ({"bytes": SMALL}, {"bytes": MEDIUM, "streamed": 0}, {"bytes": CACHED, "streamed": 0}, {"streamed": 0}, {})
SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=LINES, applies=applies),)
