"""The loop of a fleet: give pieces to idle workers, keep their results, and try lost pieces again."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kda_judge.contract.errors import ArmFailed
from kda_tools.fleet.pieces import Answer, NodeFacts, Piece, Question, Result, remaining
from kda_tools.fleet.run_folder import RunFolder, What
from kda_tools.fleet.schedule import Schedule

POLL_S = 0.5
"""Seconds between two checks of how long the pieces have run."""
GRACE_S = 20.0
"""Seconds after Ctrl-C in which pieces may hand over what they have; nox gives a command as long."""
START_S = 30.0
"""Seconds that a piece takes before its first item: its processes start, and upstream's functions are compiled. Without
them, a short piece would make every row of a long one look as slow as a start."""
UNKNOWN = 1.5
"""A subject of which no piece has come back may be slower than all others, by as much."""
ALONE_S = 120.0
"""Seconds without a live worker, while some are still starting, after which the fleet gives up."""


@dataclass(frozen=True)
class Worker:
    """One GPU, or one share of a CPU."""

    name: str
    node: str
    slot: int
    """Index among the workers of its node."""
    slots: int
    facts: NodeFacts

    @property
    def gpu(self) -> str | None:
        """Uuid of the GPU; None without one."""
        return self.facts.uuid


@dataclass(frozen=True)
class WorkerReport:
    """What happened to a worker that was given a question."""

    worker: Worker
    answer: Answer | None
    """None: the worker died; `why` says how."""
    why: str = ""


class Pool(Protocol):
    """Workers, by whatever means they run. The pool replaces a worker that dies, if it can."""

    def idle(self) -> Sequence[Worker]:
        """Workers that wait for a question."""

    def alive(self) -> Sequence[Worker]:
        """All workers that are up, idle or working."""

    def starting(self) -> Sequence[str]:
        """Names of workers that are not up yet."""

    def give(self, worker: Worker, question: Question) -> None:
        """Send the question to the worker."""

    def wait(self, seconds: float) -> Sequence[WorkerReport]:
        """What came back within `seconds`; returns as soon as there is something."""

    def kill(self, worker: Worker) -> None:
        """End the worker and all that it started; its question gets no answer."""

    def retire(self, worker: Worker, why: str) -> None:
        """End the worker, and do not replace it."""

    def interrupt(self) -> None:
        """Ask all working workers to hand over what they have."""


@contextmanager
def interrupts() -> Iterator[Sequence[int]]:
    """Collect Ctrl-C and SIGTERM. The first signal is only noted; later ones also call the former handler.

    A handler's exception may come between any two instructions, and would lose an answer that was just received.
    """
    seen: list[int] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        handler = usual[signal.Signals(number)]
        if len(seen) > 1 and callable(handler):
            handler(number, frame)

    mine = threading.current_thread() is threading.main_thread()
    noted = [number for number, handler in usual.items() if mine and callable(handler)]
    for number in noted:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number in noted:
            signal.signal(number, usual[number])


@dataclass(frozen=True)
class Driver:
    """What a run of the loop needs."""

    folder: RunFolder
    pool: Pool
    ask: Callable[[Piece, int, Worker], Question]
    """Makes the question for a worker, from a piece and the number of the attempt."""
    timeout_s: float
    """Seconds for one piece; one that takes longer counts as hung."""
    mark: Callable[[str, Worker], str] = lambda line, _: line
    """Adds to a record (a JSON line) what depends on the worker that made it."""
    look: Callable[[Schedule], None] = lambda _: None
    """Called in every turn of the loop, to show the progress."""
    until: float = math.inf
    """By `time.monotonic`: no piece is begun that would probably end later."""
    divisible: bool = False
    """Whether a worker may do some of a piece's items, if all of them would take too long."""
    each_s: dict[str, float] = field(default_factory=dict)
    """Subject -> seconds of an item beyond the start, on average, in the piece of it that took longest so far."""
    expected_s: Mapping[str, float] = field(default_factory=dict)
    """The same from earlier runs, for subjects of which no piece has come back."""

    def run(self, schedule: Schedule) -> bool:
        """Work until all pieces are done or given up. False after Ctrl-C or at the limit; the results so far are kept.

        Raises:
            ArmFailed: no worker is alive, and none comes up.
            KeyboardInterrupt: a second Ctrl-C.
        """
        since: dict[str, float] = {}
        with interrupts() as seen:
            self._loop(schedule, since, seen)
            if not schedule.over:
                self._gather(schedule, since, seen)
                return False
        return True

    def _loop(self, schedule: Schedule, since: dict[str, float], interrupted: Sequence[int]) -> None:
        last = time.monotonic()
        while not schedule.over and not interrupted:
            self._hand_out(schedule, since)
            if self.at_limit(schedule):
                return
            for came in self.pool.wait(POLL_S):
                self._take(schedule, came, time.monotonic() - since.pop(came.worker.name))
            self._end_hanging(schedule, since)
            self.look(schedule)
            if self.pool.alive():
                last = time.monotonic()
            elif not self.pool.starting() or time.monotonic() - last > ALONE_S:
                raise ArmFailed(
                    f"no worker is left, and {len(schedule.waiting)} pieces wait: {self.folder.events_file} says "
                    f"what happened; go on by --resume {self.folder.path}"
                )

    def _hand_out(self, schedule: Schedule, since: dict[str, float]) -> None:
        names = [worker.name for worker in self.pool.alive()]
        for worker in self.pool.idle():
            chosen = schedule.next(worker.name, names, self._fits) or self._part(schedule, worker.name, names)
            if chosen is None:
                continue
            piece, attempt = chosen
            since[worker.name] = time.monotonic()
            self.folder.note(
                "started", piece=piece.id, attempt=attempt, worker=worker.name, node=worker.node, gpu=worker.gpu
            )
            left = max(self.until - time.monotonic() - START_S, 1.0)
            limit = {"limit_s": left} if left < math.inf else {}
            self.pool.give(worker, self.ask(piece, attempt, worker).model_copy(update=limit))

    def at_limit(self, schedule: Schedule) -> bool:
        """Whether pieces wait, of which none would end in time, not even in part, and nothing runs."""
        waiting = not schedule.over and not schedule.running
        return waiting and not any(self._fits(piece) or self._room(piece) for piece in schedule.waiting)

    def _fits(self, piece: Piece) -> bool:
        """Whether the piece ends in time."""
        return time.monotonic() + START_S + self._each(piece) * max(len(piece.items), 1) <= self.until

    def _each(self, piece: Piece) -> float:
        """Seconds of an item: as those of the subject took, now or in an earlier run, else longer than any took now."""
        unknown = UNKNOWN * max(self.each_s.values(), default=0.0)
        return self.each_s.get(piece.subject, self.expected_s.get(piece.subject, unknown))

    def _room(self, piece: Piece) -> int:
        """How many of the piece's items end in time; 0 if they would take less than their start."""
        each, left = self._each(piece), self.until - time.monotonic() - START_S
        count = int(left / each) if self.divisible and each and left < math.inf else 0
        return min(count, len(piece.items) - 1) if count * each >= START_S else 0

    def _part(self, schedule: Schedule, worker: str, names: Sequence[str]) -> tuple[Piece, int] | None:
        """Take as much of a piece as ends in time; None if there is none."""
        if (chosen := schedule.next(worker, names, lambda piece: self._room(piece) > 0)) is not None:
            schedule.split(worker, self._room(chosen[0]))
            return schedule.running[worker]
        return None

    def _take(self, schedule: Schedule, came: WorkerReport, seconds: float, lost: What = "lost") -> None:
        worker, answer = came.worker, came.answer
        piece, attempt = schedule.running[worker.name]
        if answer is not None and answer.line is not None:
            part = answer.complete and schedule.is_part(worker.name)
            result = Result(
                piece=piece.id,
                attempt=attempt,
                node=worker.node,
                gpu=worker.gpu,
                seconds=round(seconds, 3),
                complete=answer.complete and not part,
                items=piece.items if part else answer.items,
                spent=answer.spent,
                line=self.mark(answer.line, worker),
            )
            self.folder.keep(result, worker.name, part)
            if answer.complete:
                each = max(seconds - START_S, 0.0) / max(len(piece.items), 1)
                self.each_s[piece.subject] = max(self.each_s.get(piece.subject, 0.0), each)
                schedule.finish(worker.name)
            else:
                schedule.lose(worker.name, "interrupted", remaining(piece, self.folder.results))
        elif answer is not None and answer.refused is not None:
            schedule.refuse(worker.name, answer.refused, answer.exit_code)
            self._note("refused", worker, piece, attempt, seconds, answer.refused)
        else:
            self._lose(schedule, worker, (answer.failed if answer else None) or came.why, seconds, lost)

    def _lose(self, schedule: Schedule, worker: Worker, why: str, seconds: float, what: What = "lost") -> None:
        piece, attempt = schedule.running[worker.name]
        again = schedule.lose(worker.name, why)
        self._note(what, worker, piece, attempt, seconds, why)
        if not again:
            self._note("given-up", worker, piece, attempt, seconds, f"lost {schedule.limit} times, at last: {why}")

    def _end_hanging(self, schedule: Schedule, since: dict[str, float]) -> None:
        for worker in self.pool.alive():
            begun = since.get(worker.name)
            if begun is not None and (seconds := time.monotonic() - begun) > self.timeout_s:
                del since[worker.name]
                self.pool.kill(worker)
                self._lose(schedule, worker, f"no answer within {self.timeout_s:g} s", seconds)

    def _gather(self, schedule: Schedule, since: dict[str, float], interrupted: Sequence[int]) -> None:
        """Keep what the running pieces have so far; a second Ctrl-C ends the wait."""
        self.pool.interrupt()
        until = time.monotonic() + GRACE_S
        # Count signals, too: Python drops an exception raised in a finaliser, and Ray's finalisers run at any time.
        while since and time.monotonic() < until and len(interrupted) == 1:
            for came in self.pool.wait(POLL_S):
                self._take(schedule, came, time.monotonic() - since.pop(came.worker.name), "interrupted")
            self.look(schedule)

    def _note(self, event: What, worker: Worker, piece: Piece, attempt: int, seconds: float, why: str) -> None:
        self.folder.note(
            event,
            piece=piece.id,
            attempt=attempt,
            worker=worker.name,
            node=worker.node,
            gpu=worker.gpu,
            seconds=round(seconds, 3),
            why=why,
        )
