"""Choose the core that arms are pinned to while they are timed: one that nobody else slows down.

The cores of a virtual machine are hardware threads. While another guest uses the other thread of a physical core, all
work takes 1.4 to 1.9 times as long, for seconds at a time, and nothing in this machine shows why. So wall times had two
levels, and A/A differed by tens of per cent. A short piece of fixed work shows the level: it is done on the core before
every round of samples, and if it takes longer than it can, the arms go to another core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import perf_counter

STEPS = 6_000
"""Steps of the work, about 0.3 ms. Python's own loop is slowed down by a busy neighbour as arms are."""
SLOW = 1.15
"""A core is shared if the work takes this many times its shortest time. Clock rates of cores differ by less."""


def work_s() -> float:
    """Seconds of the work on this thread's core, the shorter of two times: the first one may have to warm caches."""
    times = []
    for _ in range(2):
        begin, value = perf_counter(), 0
        for step in range(STEPS):
            value ^= step
        times.append(perf_counter() - begin)
    return min(times)


class QuietCore:
    """The core for the next samples. The judge's own thread is kept off it."""

    def __init__(self, cores: Sequence[int], work: Callable[[], float] = work_s) -> None:
        """`cores` are those that the judge and its workers may use; with fewer than two nothing is pinned."""
        self._cores = sorted(cores, reverse=True) if len(cores) > 1 else []
        self._work = work
        self._shortest = float("inf")
        self.core: int | None = None
        """The chosen core; None before the first choice, or if nothing is pinned."""
        self.rounds: dict[int, int] = {}
        """Core -> how often it was chosen."""

    @property
    def usual(self) -> int | None:
        """The core that was chosen most often."""
        return max(self.rounds, key=self.rounds.__getitem__, default=None)

    def choose(self) -> int | None:
        """The core that is in use while its work is as short as it can be, else the first such one, or the fastest."""
        if not self._cores:
            return None
        if self.core is None:
            times = {core: self._measured(core) for core in self._cores}
        else:
            times = {self.core: self._measured(self.core)}
            for core in self._cores:
                if min(times.values()) <= SLOW * self._shortest:
                    break
                times[core] = self._measured(core)
        self.core = min(times, key=times.__getitem__)
        self.rounds[self.core] = self.rounds.get(self.core, 0) + 1
        os.sched_setaffinity(0, set(self._cores) - {self.core})
        return self.core

    def _measured(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        took = self._work()
        self._shortest = min(self._shortest, took)
        return took

    def release(self) -> None:
        """Let the judge use every core again."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)
