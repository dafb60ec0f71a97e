"""What a call takes the host, from the wall times of a sweep: one number per op and kind of call.

What the host does depends only on how many kernels a call launches, and through what. Its time for that is disturbed by
more than the device's: by 10 to 20% from sample to sample, and for tens of rows on end by other work on the machine,
which made it 1.6 times as long in a sweep of 2026-11-20. Disturbance only adds. So a kind's time is the least of the
rows' medians, each over those of its candidates on the row whose wall time is clearly longer than the device's; a kind
without any has none, and the device decides. Kinds of an op that are less than `RESOLUTION` apart cost the same, the
least of them, so that noise does not rank them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kda_tools.lab.tune.sweep_record import RowTimes

HOST_BOUND = 1.1
"""Wall time over device time from which the host decides; where the device does, a sample's ends add 1 to 3%."""
RESOLUTION = 0.05
"""Of a kind's time: in that sweep the medians of one kind on undisturbed rows were within 5% of each other."""

Kind = tuple[str, str | None]
"""The op and what it launches."""


def host_times(rows: Sequence[RowTimes]) -> dict[Kind, float]:
    """Kind of call -> microseconds of the host, for those kinds of which some were bound by it."""
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
