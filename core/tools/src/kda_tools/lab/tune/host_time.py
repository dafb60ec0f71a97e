"""How long a call keeps the host busy, from the wall times of a sweep: one number per op and kind of call.

The host's work depends only on how many kernels a call launches, and by which launcher; calls with the same number
and launcher are of one kind. The host's time is noisier than the device's: it varies by 10 to 20% from sample to
sample, and other work on the machine made it 1.6 times as long for tens of rows in a sweep of 2026-11-20. Noise only
adds time.

So for each kind and row, take the median wall time of the host-bound candidates (those whose wall time is clearly
longer than their device time). The kind's host time is the smallest of these medians. A kind without host-bound
candidates has no host time, and device time alone ranks it. Kinds of one op whose times differ by less than
`RESOLUTION` get the smaller time, so that noise does not rank them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kda_tools.lab.tune.sweep_record import RowTimes

HOST_BOUND = 1.1
"""Wall time over device time from which a candidate is host-bound; in others the ends of a sample add 1 to 3%."""
RESOLUTION = 0.05
"""Relative: in that sweep the medians of one kind on quiet rows were within 5% of each other."""

Kind = tuple[str, str | None]
"""The op and what it launches."""


def host_times(rows: Sequence[RowTimes]) -> dict[Kind, float]:
    """Kind of call -> microseconds of the host, for kinds with host-bound candidates."""
    medians: dict[Kind, list[float]] = {}
    for row in rows:
        for kind, walls in _bound(row).items():
            medians.setdefault(kind, []).append(median(walls))
    least = {kind: min(us) for kind, us in medians.items()}
    times: dict[Kind, float] = {}  # in ascending order, so that of equal kinds the least comes first
    for kind, us in sorted(least.items(), key=lambda item: item[1]):
        same = (known for other, known in times.items() if other[0] == kind[0] and us <= known * (1 + RESOLUTION))
        times[kind] = next(same, us)
    return times


def _bound(row: RowTimes) -> dict[Kind, list[float]]:
    """The row's wall times that the host decided, by kind."""
    found: dict[Kind, list[float]] = {}
    if row.walls is not None:
        for device, wall, launched in zip(row.median_us, row.walls.median_us, row.walls.kinds, strict=True):
            if device is not None and wall is not None and wall >= HOST_BOUND * device:
                found.setdefault((row.walls.op, launched), []).append(wall)
    return found
