"""Count how calls ended, in files that stay complete however the process ends: a log and a mapped file of counters.

Every process of `kda apply` has two files in one shared folder. `NAME.jsonl` lists single events, and what each counter
counts. `NAME.counts` holds the counters, 64 bits each, mapped into memory. Both files are complete even if the process
is killed, and an increment needs no system call.

This file imports only the standard library: a copy of it runs in the processes of the command.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SLOTS = 4096
"""Most counters of one process."""
RESERVED = 512
"""So many of these are left to functions, of which there are dozens: then all new reasons share the reason `OTHERS`."""
OTHERS = "other reasons"


class Counted(NamedTuple):
    """What a counter counts."""

    function: str
    """Name of the function that was replaced."""
    outcome: str
    """`taken`, `compiled` (taken inside a compiled graph), `fell_back`, or `plain` (fell back inside such a graph)."""
    reason: str = ""


class Counts:
    """The counters of this process. Its files appear with the first thing that is written."""

    __slots__ = ("_folder", "_lock", "_log", "_slots", "view")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._slots: dict[Counted, int] = {}
        self._log: Path | None = None
        self.view: Any = None
        """The counters. `view[slot] += 1` is safe between threads in CPython with its global lock."""
        os.register_at_fork(after_in_child=self._after_fork)

    def log_event(self, event: str, **facts: Any) -> None:
        """Write down that something happened."""
        with self._lock:
            self._write({"event": event, **facts})

    def slot(self, counted: Counted) -> int:
        """The index of its counter, which is made when it is first asked for."""
        if (known := self._slots.get(counted)) is not None:
            return known
        with self._lock:
            if counted.reason and len(self._slots) >= SLOTS - RESERVED:  # a reason may hold any shape
                counted = counted._replace(reason=OTHERS)
            if counted not in self._slots:
                self._write({"event": "counter", "slot": len(self._slots), "counted": counted})
                self._slots[counted] = len(self._slots)
            return self._slots[counted]

    def add(self, counted: Counted) -> None:
        """Add one to the counter for `counted`."""
        slot = self.slot(counted)  # before `view` is read: this may create it
        self.view[slot] += 1

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._log is None:
            self._log = self._folder / f"{os.getpid()}-{time.time_ns()}.jsonl"
            with self._log.with_suffix(".counts").open("w+b") as file:
                file.truncate(8 * SLOTS)
                self.view = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def _after_fork(self) -> None:
        """Give a forked child files of its own: if it shared its parent's map, increments could be lost."""
        known, self._slots, self._log, self._lock = list(self._slots), {}, None, threading.Lock()
        for counted in known:
            self.slot(counted)


@dataclass
class Gathered:
    """What all processes wrote, added up."""

    processes: int = 0
    """Processes that imported the framework."""
    calls: Counter[Counted] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    """All log lines that define no counter; those of one process are in order."""

    def events_named(self, event: str) -> list[dict[str, Any]]:
        """The events of this name."""
        return [one for one in self.events if one["event"] == event]


def gather(folder: Path) -> Gathered:
    """Add up the files of all processes; a log line that is cut short is ignored."""
    found = Gathered()
    for log in sorted(folder.glob("*.jsonl")):
        found.processes += 1
        view = memoryview(log.with_suffix(".counts").read_bytes()).cast("q")
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["event"] == "counter":
                found.calls[Counted(*entry["counted"])] += view[entry["slot"]]
            else:
                found.events.append(entry)
    return found
