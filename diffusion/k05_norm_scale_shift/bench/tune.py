"""Which configurations may be chosen: `kda tune norm_scale_shift` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.norm_scale_shift import ALL, TUNED, Config

SMALL = 2**22
"""Bytes of x up to which a row is one wave of programs, each of which waits and computes alone."""
MEDIUM = 12_000_000
"""Bytes of x up to which a row is a few waves of programs, with x and y in the L2 cache."""
CACHED = 2**25
"""Bytes of x up to which x and y fill the L2 cache: data that is streamed past the cache leaves x there."""


def grid() -> Iterator[Config]:
    """Warps and rows of a program with both orders of loads; then the settings that do not depend on these.

    2 warps would be raised to 4 for every frozen row, except those of 1536 columns, for which 4 are lowered to 2. Two
    rows of 5120 columns take 156 registers, with which 3 programs run at a time; with 128 registers 4 do.
    """
    for warps, rows in ((4, 1), (8, 1), (4, 2)):
        for ahead, store in ((ALL, ""), (ALL, ".cs"), (1, "")):
            yield Config(warps, rows, ahead=ahead, store=store)
    for warps in (8, 16):
        yield Config(warps, whole=False)
    yield Config(4, pdl=False)
    for rows, load, store in product((1, 2), (".cg", "evict_first"), ("", ".cs")):
        yield Config(4, rows, load=load, store=store)
    for rows, maxnreg in ((1, 80), (1, 96), (2, 128)):
        yield Config(4, rows, maxnreg=maxnreg)


def applies(config: Config, features: Features) -> bool:
    """Whether a row times `config`. For small rows only one program's speed matters, not their number or caches."""
    if features["bytes"] <= SMALL:
        return config.rows == 1 and not config.load and not config.maxnreg
    return config.whole


LINES = ({"bytes": SMALL}, {"bytes": MEDIUM, "streamed": 0}, {"bytes": CACHED, "streamed": 0}, {"streamed": 0}, {})
SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=LINES, applies=applies),)
