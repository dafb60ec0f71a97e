"""Count where the seconds of a run go, by the judge's own clock, to see what would make a run shorter."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

COMMANDS: Mapping[str, str] = {
    "start": "starting workers",
    "hello": "starting workers",
    "warm": "first calls",
    "verify": "verifying",
    "choose": "choosing limits",
    "capture": "capturing graphs",
    "wall": "timing",
    "latency": "timing",
    "replay": "timing",
    "profile": "counting kernels",
}
"""Command of a worker -> what its time counts as; the other commands set rows up and hand outputs back."""
OTHER_COMMANDS, REST = "handing data over", "the rest"


class Spent:
    """Seconds by what they went to. Parts never overlap."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        """`finish` waits until the device is idle, so that its work counts where it was asked for."""
        self._finish = finish
        self._begin = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._commands: str | None = None

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the time of the block as `part`."""
        begin = time.perf_counter()
        try:
            yield
            self._finish()
        finally:
            self._seconds[part] += time.perf_counter() - begin

    @contextmanager
    def commands_as(self, part: str) -> Iterator[None]:
        """Count all workers' commands of the block as `part`, whatever they are."""
        self._commands = part
        try:
            yield
        finally:
            self._commands = None

    def answered(self, command: str, begin: float) -> None:
        """Count the time since `begin` as a worker's, for this command."""
        self._seconds[self._commands or COMMANDS.get(command, OTHER_COMMANDS)] += time.perf_counter() - begin

    def line(self, rows: int, arms: int) -> str:
        """`12.3 s, 0.6 s a row and arm: timing 61%, oracle 20%, ...`, the largest part first."""
        total = time.perf_counter() - self._begin
        parts = dict(sorted(self._seconds.items(), key=lambda part: -part[1])) | {
            REST: total - sum(self._seconds.values())
        }
        shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
        return f"{total:.1f} s, {total / max(rows * arms, 1):.2f} s a row and arm: {shares}"
