"""What a call takes the host, from the wall times of a sweep: one number per op and kind of call.

The host's time varies by 10 to 20% from sample to sample, the device's by 0.3%, but what the host does depends only on
how many kernels a call launches, and through what. So its time for a kind of call is the median of the wall times, over
all candidates and rows of the table that are of this kind, wherever they are clearly longer than the device takes; a
kind for which they never are has none, and the device decides. Kinds of an op that are closer than their uncertainties
together (interquartile range over the median and the square root of the rows, since what disturbs the host lasts for
longer than a row) cost the same, the least of them, so that noise does not rank them either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kda_core.tune.records import RowTimes

HOST_BOUND = 1.1
"""Wall time over device time from which the host decides; where the device does, a sample's ends add 1 to 3%."""

Kind = tuple[str, str | None]
"""The op and what it launches."""


@dataclass(frozen=True)
class _Host:
    """One kind of call."""

    kind: Kind
    us: float
    uncertainty: float
    """Of `us`, over it."""


def host_times(rows: Sequence[RowTimes]) -> dict[Kind, float]:
    """Kind of call -> microseconds of the host, for those kinds of which some were bound by it."""
    samples: dict[Kind, dict[str, list[float]]] = {}
    for row in rows:
        if row.walls is None:
            continue
        for device, wall, launched in zip(row.median_us, row.walls.median_us, row.walls.kinds, strict=True):
            if device is not None and wall is not None and wall >= HOST_BOUND * device:
                samples.setdefault((row.walls.op, launched), {}).setdefault(row.row, []).append(wall)
    found: list[_Host] = []  # of kinds that cost the same only the least
    times: dict[Kind, float] = {}
    for one in sorted((_host(kind, walls) for kind, walls in samples.items()), key=lambda one: one.us):
        least = next((other for other in found if _same(other, one)), one)
        if least is one:
            found.append(one)
        times[one.kind] = least.us
    return times


def _same(less: _Host, more: _Host) -> bool:
    return less.kind[0] == more.kind[0] and more.us <= less.us * (1 + less.uncertainty + more.uncertainty)


def _host(kind: Kind, by_row: Mapping[str, Sequence[float]]) -> _Host:
    walls = list(chain.from_iterable(by_row.values()))
    middle = median(walls)
    if len(walls) == 1:
        return _Host(kind, middle, 0.0)
    low, _, high = quantiles(walls, n=4, method="inclusive")
    return _Host(kind, middle, (high - low) / middle / sqrt(len(by_row)))
