"""Decide which piece goes to which worker, and what happens to a lost one. Knows no clock, no process and no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kda_judge.contract.errors import ExitCode
from kda_tools.fleet.pieces import Piece


@dataclass
class Schedule:
    """The pieces of a run that are not done yet."""

    waiting: list[Piece]
    limit: int
    """Number of losses at which a piece is given up."""
    attempts: Counter[str] = field(default_factory=Counter)
    running: dict[str, tuple[Piece, int]] = field(default_factory=dict)
    """Worker -> its piece, and which attempt that is."""
    lost: Counter[str] = field(default_factory=Counter)
    failed: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Piece -> why it failed for good, and the exit code for that."""
    _unlucky: dict[str, set[str]] = field(default_factory=dict)
    """Piece -> workers that lost it."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], done: Collection[str], attempts: Mapping[str, int], limit: int) -> Schedule:
        """The pieces without those that are done; attempts are counted on from those of an earlier process."""
        return cls([piece for piece in pieces if piece.id not in done], limit, Counter(attempts))

    def next(
        self, worker: str, others: Collection[str] = (), fits: Callable[[Piece], bool] = lambda _: True
    ) -> tuple[Piece, int] | None:
        """Take a piece that fits for an idle worker, which runs it from now on; None if there is none.

        A piece that this worker has lost waits for another worker of `others` (live ones) that has not, if any.
        """
        for piece in self.waiting:
            unlucky = self._unlucky.get(piece.id, set())
            if not fits(piece) or (worker in unlucky and set(others) - unlucky - {worker}):
                continue
            self.waiting.remove(piece)
            self.attempts[piece.id] += 1
            self.running[worker] = (piece, self.attempts[piece.id])
            return self.running[worker]
        return None

    def split(self, worker: str, count: int) -> None:
        """The worker does only the first `count` items of its piece; the others wait, under the same name."""
        piece, attempt = self.running[worker]
        self.running[worker] = (piece.model_copy(update={"items": piece.items[:count]}), attempt)
        self.waiting.insert(0, piece.model_copy(update={"items": piece.items[count:]}))

    def is_part(self, worker: str) -> bool:
        """Whether other items of the worker's piece wait, are worked on, or have failed."""
        name = self.running[worker][0].id
        others = [*self.waiting, *(piece for other, (piece, _) in self.running.items() if other != worker)]
        return name in self.failed or any(piece.id == name for piece in others)

    def finish(self, worker: str) -> tuple[Piece, int]:
        """The piece of a worker has come back, and runs no more."""
        return self.running.pop(worker)

    def refuse(self, worker: str, why: str, code: int) -> None:
        """The piece of a worker would fail on any worker: it has failed for good."""
        piece, _ = self.running.pop(worker)
        self.failed[piece.id] = (why, code)

    def lose(self, worker: str, why: str, rest: Piece | None = None) -> bool:
        """The piece of a worker did not come back: it, or the `rest` of it, waits again, before all others.

        False if it is given up instead.
        """
        piece, _ = self.running.pop(worker)
        piece = rest or piece
        self.lost[piece.id] += 1
        self._unlucky.setdefault(piece.id, set()).add(worker)
        if self.lost[piece.id] >= self.limit:
            self.failed[piece.id] = (why, ExitCode.ARM_FAILED)
            return False
        self.waiting.insert(0, piece)
        return True

    @property
    def over(self) -> bool:
        """Nothing waits or runs."""
        return not self.waiting and not self.running
