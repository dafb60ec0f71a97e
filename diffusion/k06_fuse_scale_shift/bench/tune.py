"""Which configurations may be chosen: `kda tune fuse_scale_shift` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution import scale_shift, select01


def scale_shifts() -> Iterator[scale_shift.Config]:
    """Warps, rows and stores; launches without PDL only with few rows a program."""
    for warps, rows, store in product((4, 2, 8, 1), (1, 2, 4, 8), ("", ".cs")):
        yield scale_shift.Config(warps, rows, store=store)
        if rows <= 2:
            yield scale_shift.Config(warps, rows, pdl=False, store=store)
        if rows <= 4 and not store:
            # x should not push out y, which the next kernel reads.
            yield scale_shift.Config(warps, rows, load="evict_first")


def selections() -> Iterator[select01.Config]:
    """Warps and rows, which share them evenly; launches without PDL only with one row a program."""
    for warps, rows, early, store in product((4, 2, 8), (1, 2, 4, 8), (True, False), ("", ".cs")):
        if rows < warps or (rows == warps and not early):  # early, with one warp a row, spills
            yield select01.Config(warps, rows, store=store, early=early)
        if rows == 1:
            yield select01.Config(warps, rows, pdl=False, store=store, early=early)


SWEEPS = (
    Sweep(
        table=scale_shift.TUNED,
        candidates=tuple(scale_shifts()),
        lines=({"elements": 4_000_000}, {"elements": 16_000_000}, {}),
    ),
    Sweep(table=select01.TUNED, candidates=tuple(selections()), lines=({},)),
)
