"""Joins runs over parts of a grid, if they agree in everything that decides a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kda_judge.evidence.run_record import Provenance, Settings, Verdict
from kda_tools.lab.grid.grid_record import FailedRow, GridRecord, Worst, positions, worse_of

COMPILERS = ("torch", "triton", "cutlass-dsl", "cuda")
"""Programs whose versions decide which machine code runs; the driver's does not."""
WRONG = frozenset({Verdict.INCORRECT, Verdict.INVALID})
"""Verdicts that stand whatever a later run finds: something was computed, and it was wrong. After ERROR and TIMEOUT
there was nothing to compare, and the machine may be to blame, so a later check of the row counts instead."""


@dataclass(frozen=True)
class State:
    """What two runs must have in common to be joined."""

    gpu: str
    total: int
    grid: str
    arms: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    """Content hashes, pins and compilers, by name."""


@dataclass(frozen=True)
class Failure:
    """A row that failed in one run."""

    row: FailedRow
    record: GridRecord
    agreed_later: bool
    """Whether a later run of the same state checked the row and found it to agree."""

    @property
    def stands(self) -> bool:
        """Whether the row still counts as failed."""
        return self.row.verdict in WRONG or not self.agreed_later

    @property
    def of_opponent(self) -> bool:
        """Whether an opponent failed, so that the row says nothing about the subject."""
        opponents = tuple(f"arm {name!r} " for name in self.record.settings.against)
        return self.row.verdict not in WRONG and self.row.reason.startswith(opponents)


@dataclass(frozen=True)
class Coverage:
    """All runs of one state."""

    state: State
    records: tuple[GridRecord, ...]
    """Oldest first."""
    checked: frozenset[int]
    """Positions that some run checked."""
    failures: tuple[Failure, ...]

    @property
    def failed(self) -> int:
        """Rows that do not agree with the oracle."""
        return len({one.row.position for one in self.failures if one.stands and not one.of_opponent})

    @property
    def not_compared(self) -> int:
        """Rows on which an opponent failed, and nothing else."""
        standing = {one.row.position for one in self.failures if one.stands}
        return len(standing) - self.failed

    @property
    def settled_positions(self) -> frozenset[int]:
        """Positions that need no further check: a row on which a check broke off may be tried again."""
        return self.checked - {one.row.position for one in self.failures if one.stands and one.row.verdict not in WRONG}

    @property
    def calls(self) -> int:
        """Number of calls that were compared in full, over all runs."""
        return sum(record.calls for record in self.records)

    @property
    def opponents(self) -> dict[str, list[str]]:
        """Arm -> rows on which it was outside the tolerance or refused in some run, each once."""
        found: dict[str, dict[str, None]] = {}
        for record in self.records:
            for arm, ids in record.opponents.items():
                found.setdefault(arm, {}).update(dict.fromkeys(ids))
        return {arm: list(ids) for arm, ids in found.items()}

    @property
    def worst(self) -> dict[str, Worst]:
        """Dtype -> the worst outputs over all runs."""
        found: dict[str, Worst] = {}
        for record in self.records:
            for dtype, worst in record.worst.items():
                found[dtype] = worse_of(found.get(dtype), worst)
        return dict(sorted(found.items()))


def state(source: Provenance, settings: Settings, gpu: str, total: int, grid: str) -> State:
    """The state of a run with this provenance on that kind of GPU, over a grid of `total` rows and this fingerprint."""
    named: Mapping[str, str] = {
        **source.hashes,
        **{f"pin of {arm}": pin for arm, pin in source.pins.items()},
        **{name: source.versions[name] for name in COMPILERS if name in source.versions},
    }
    return State(
        gpu=gpu, total=total, grid=grid, arms=(settings.subject, *settings.against), parts=tuple(sorted(named.items()))
    )


def state_of(record: GridRecord) -> State:
    """The state of a recorded run."""
    return state(record.provenance, record.settings, record.gpu, record.total, record.grid)


def join(records: Sequence[GridRecord]) -> list[Coverage]:
    """One coverage for each state, in the order of their latest runs; `records` are sorted, oldest first."""
    states = [(state_of(record), record) for record in records]
    latest = {found: number for number, (found, _) in enumerate(states)}
    ordered = sorted(states, key=lambda pair: latest[pair[0]])
    return [_joined(found, [record for _, record in pairs]) for found, pairs in groupby(ordered, lambda pair: pair[0])]


def _joined(found: State, records: Sequence[GridRecord]) -> Coverage:
    checked = [frozenset(positions(record.checked)) for record in records]
    failed = [{row.position for row in record.failed} for record in records]
    failures = [
        Failure(
            row=row,
            record=record,
            agreed_later=any(
                row.position in checked[later] - failed[later] for later in range(number + 1, len(records))
            ),
        )
        for number, record in enumerate(records)
        for row in record.failed
    ]
    return Coverage(state=found, records=tuple(records), checked=frozenset().union(*checked), failures=tuple(failures))
