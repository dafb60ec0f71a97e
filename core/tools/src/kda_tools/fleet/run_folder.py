"""The folder of a fleet: `events.jsonl` holds all that happened, `results.jsonl` all that came back.

One process writes both, and only appends. A result is on disk before its event is, and a piece that has a complete
result never gets a second one, so that nothing is lost or counted twice whenever the process is killed.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Amount, Strict
from kda_judge.evidence import record_log
from kda_judge.evidence.run_record import SharedHost
from kda_tools.fleet.pieces import Order, Piece, Result

What = Literal[
    "planned",
    "resumed",
    "joined",
    "measured",
    "started",
    "finished",
    "part",
    "doubled",
    "interrupted",
    "lost",
    "refused",
    "given-up",
    "retired",
    "recorded",
    "ended",
]


def moment_of(utc: str) -> datetime:
    """The moment that a record names; Python 3.10 reads no `Z`."""
    return datetime.fromisoformat(utc.replace("Z", "+00:00"))


class Plan(Strict):
    """All that a later process needs to resume the run."""

    order: Order
    pieces: tuple[Piece, ...]
    commit: str
    files: dict[str, str]
    """Op -> digest of all that decides its numbers: with other files a run cannot be resumed."""


class Event(Strict):
    """One line of `events.jsonl`.

    planned: the first line. joined: a worker is ready. measured: the neighbours' influence. started, finished: a piece.
    part: some items of a piece are done, as many as a limit left time for. doubled: a piece came back a second time,
    and was dropped. lost: a piece did not come back, for the reason `why`. refused: it would fail on any worker.
    given-up: it was lost too often. retired: a worker was ended for good. recorded: `why` names the log and the run.
    finished, of a bench: `why` says what the seconds were spent on.
    """

    event: What
    utc: str
    piece: str | None = None
    attempt: int | None = None
    worker: str | None = None
    node: str | None = None
    gpu: str | None = None
    """Uuid of the GPU."""
    seconds: Amount | None = None
    """How long the attempt at the piece took."""
    why: str | None = None
    plan: Plan | None = None
    shared: SharedHost | None = None

    @property
    def moment(self) -> datetime:
        """When it happened."""
        return moment_of(self.utc)


class RunFolder:
    """The folder of one fleet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events_file, self.results_file = path / "events.jsonl", path / "results.jsonl"
        self._results: list[Result] = []
        self._events: list[Event] = []

    @contextmanager
    def open(self) -> Iterator[RunFolder]:
        """Read the folder, and lock out other writers; a new folder in which nothing was noted is removed again.

        Raises:
            UsageError: the folder cannot be made or written, or another process writes here.
        """
        made = not self.path.exists()
        lock_file = self.path / "lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = lock_file.open("w")
        except OSError as error:
            why = error.strerror
            raise UsageError(f"--out {self.path}: expected a folder, or where one can be made, got: {why}") from None
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"{self.path}: another `kda fleet` is writing here; wait for it, or end it") from None
            for file in (self.events_file, self.results_file):
                _cut_torn_line(file)
            self._events = record_log.read(self.events_file, Event)
            self._results = record_log.read(self.results_file, Result)
            try:
                yield self
            finally:
                if made and not self._events:
                    lock_file.unlink()
                    self.path.rmdir()

    def note(self, event: What, **more: Any) -> Event:
        """Append an event."""
        moment = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        made = Event(event=event, utc=moment, **more)
        record_log.append(self.events_file, made)
        self._events.append(made)
        return made

    def keep(self, result: Result, worker: str | None = None, part: bool = False) -> bool:
        """Append a result, of a `part` of its piece or not; False if it is dropped because there is a complete one."""
        facts = result.model_dump(include={"piece", "attempt", "node", "gpu", "seconds"})
        if result.piece in self.complete_pieces:
            self.note("doubled", worker=worker, **facts)
            return False
        record_log.append(self.results_file, result)
        self._results.append(result)
        ended: What = "part" if part else "finished" if result.complete else "interrupted"
        self.note(ended, worker=worker, why=result.spent, **facts)
        return True

    @property
    def plan(self) -> Plan | None:
        """What the run is about; None in a new folder."""
        return next((event.plan for event in self._events if event.plan is not None), None)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, in order."""
        return tuple(self._events)

    @property
    def results(self) -> tuple[Result, ...]:
        """In the order in which they came, interrupted ones included."""
        return tuple(self._results)

    @property
    def complete_pieces(self) -> frozenset[str]:
        """Pieces with a complete result."""
        return frozenset(result.piece for result in self._results if result.complete)

    @property
    def attempts(self) -> Counter[str]:
        """How often each piece was started."""
        return Counter(event.piece for event in self._events if event.event == "started" and event.piece)


def _cut_torn_line(file: Path) -> None:
    """Move the unfinished last line of a killed writer, which is no result yet, to a file beside it."""
    if not file.is_file():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return
    with file.with_suffix(".torn").open("ab") as beside:
        beside.write(content[whole:] + b"\n")
    os.truncate(file, whole)
