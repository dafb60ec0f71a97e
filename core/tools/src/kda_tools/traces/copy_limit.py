"""Find how fast a GPU can move a number of bytes, from the measurements in the tasks' ledgers.

Every recorded row holds its device limit: how long the judge's own stream took for as many bytes, on that GPU, in that
run. The newest clean run of each task gives the measured points (bytes, us). A point is kept only if no other point
moved as many bytes or more in as little time or less. Between two points the limit is interpolated on logarithms. Below
the smallest point it is that point's time, a kernel's fixed cost. Beyond the largest it grows in proportion.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import RunRecord
from kda_tools.publish import report


@dataclass(frozen=True)
class CopyLimit:
    """Measured points of one GPU, both coordinates growing; `runs` are the ids of the runs they are from."""

    gpu: str
    points: tuple[tuple[int, float], ...]
    runs: tuple[str, ...]

    def us(self, moved: int) -> float:
        """Microseconds in which this GPU can move so many bytes, one kernel's fixed cost included."""
        sizes = [size for size, _ in self.points]
        at = bisect_left(sizes, moved)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            size, us = self.points[-1]
            return us * moved / size
        (low, low_us), (high, high_us) = self.points[at - 1], self.points[at]
        part = log(moved / low) / log(high / low)
        return exp(log(low_us) + part * log(high_us / low_us))


def copy_limit(gpu: str, tasks: Iterable[Task]) -> CopyLimit | None:
    """The limit of the GPU with this name; None if no clean run was recorded on it."""
    points: list[tuple[int, float]] = []
    runs = []
    for task in tasks:
        fitting = [run for run in report.recorded(task) if _clean(run, gpu)]
        if fitting:
            newest = max(fitting, key=lambda run: run.utc)
            runs.append(newest.run_id)
            points += [(row.limit.bytes_moved, row.limit.device_us) for row in newest.rows if row.limit is not None]
    return CopyLimit(gpu, envelope(points), tuple(runs)) if points else None


def envelope(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points that no other beats: of as many bytes or more in as little time or less. In growing order."""
    kept: list[tuple[int, float]] = []
    for size, us in sorted(points, key=lambda point: (-point[0], point[1])):
        if not kept or us < kept[-1][1]:
            kept.append((size, us))
    return tuple(reversed(kept))


def _clean(run: RunRecord, gpu: str) -> bool:
    before = run.machine.before
    settings = run.settings
    return (
        before is not None
        and before.name == gpu
        and not (run.noisy or run.partial or settings.quick or settings.all_cold)
    )
