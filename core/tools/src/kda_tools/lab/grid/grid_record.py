"""What a regression grid showed on a GPU: one JSON line in a task's `docs/grid.jsonl` per `kda validate --record`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.errors import LedgerError
from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.record_log import read
from kda_judge.evidence.run_record import Machine, Provenance, RowResult, RunRecord, Settings, Verdict

Range = tuple[int, int]
"""First and last position, both included."""

HOST_ERROR = "RuntimeError: "
"""How errors begin that host code of SGLang and PyTorch raises about a call: checks of its arguments, a kernel whose
source does not compile for its dtype."""
GPU_ERROR = re.compile(
    r"\bCUDA|cudaError|(?i:cublas|cudnn|out of memory|illegal|misaligned|device-side|launch failure)"
)
"""What such an error says if the GPU may have failed. `cuda` in the name of a file or a device says nothing."""


class FailedRow(Strict):
    """A row that does not agree with the oracle, or could not be compared with it."""

    id: str
    position: int
    verdict: Verdict
    reason: str


class Worst(Strict):
    """How far the subject's outputs of one dtype were from the oracle, over the rows that agree."""

    used: Annotated[float, Field(ge=0, le=1)]
    """Largest share of its own tolerance that any element used."""
    row: str
    output: str
    """Where that was."""
    rel_l2: Amount
    """Largest relative error of a whole output, in whichever row."""


class GridRecord(Strict):
    """One run over a grid, with the rows that it checked to the end, even if it was limited or interrupted.

    Positions count from 0 in the grid's order: the frozen rows, then those of `bench/grid.py`.
    """

    schema_version: Literal[1] = 1
    run_id: str
    utc: str
    """Start, ISO 8601 with Z."""
    seconds: Amount
    command: str
    task: str
    provenance: Provenance
    machine: Machine
    settings: Settings
    total: Annotated[int, Field(gt=0, le=10**6)]
    """Rows of the whole grid."""
    grid: Digest
    """sha256 of the row ids in order, a line each. If it is equal in two runs, their positions mean the same rows."""
    asked: Count
    """Rows that this run was to check."""
    checked: tuple[Range, ...]
    """Positions that it did check, ascending."""
    calls: Count
    """Number of calls whose outputs were compared in full, over all arms."""
    failed: tuple[FailedRow, ...]
    opponents: dict[str, tuple[str, ...]]
    """Arm -> rows on which it is outside the tolerance or refuses, and the subject is right."""
    worst: dict[str, Worst]
    """Dtype of the output -> the worst outputs."""
    interrupted: bool = False
    node: str | None = None
    """Name of the machine within a fleet."""
    attempt: Annotated[int, Field(gt=0)] | None = None
    """Number of this attempt, from 1; a fleet repeats lost ones. None outside a fleet."""

    @model_validator(mode="after")
    def _consistent(self) -> GridRecord:
        if self.machine.kind != "cuda" or self.machine.before is None:
            raise ValueError("machine: expected a GPU and its state, got a run without one")
        previous = -2
        for first, last in self.checked:
            if not previous + 1 < first <= last < self.total:
                raise ValueError(f"checked: expected ascending ranges with gaps below {self.total}, got {self.checked}")
            previous = last
        checked = set(positions(self.checked))
        for row in self.failed:
            if row.position not in checked:
                raise ValueError(f"failed: row {row.id!r} at {row.position} is not among the checked ones")
            if row.verdict in (*MEASURED, Verdict.CORRECT):
                raise ValueError(f"failed: row {row.id!r}: expected the verdict of a failure, got {row.verdict.value}")
        agreed = len(checked) - len(self.failed)
        if not len(checked) <= self.asked <= self.total or self.calls < agreed or (self.worst and not agreed):
            raise ValueError(
                f"asked, calls, worst: expected {len(checked)} to {self.total} rows, {agreed} calls or more, and "
                f"worst outputs of {agreed} rows, got {self.asked}, {self.calls} and {sorted(self.worst)}"
            )
        failed = [row.id for row in self.failed], [row.position for row in self.failed]
        several: list[Sequence[object]] = [*failed, *self.opponents.values()]
        if any(len(set(one)) < len(one) for one in several):
            raise ValueError("failed, opponents: expected each row once")
        if odd := self.opponents.keys() - set(self.settings.against):
            raise ValueError(f"opponents: expected {', '.join(self.settings.against)}, got {', '.join(sorted(odd))}")
        return self

    @property
    def gpu(self) -> str:
        """The kind of GPU, as NVML names it."""
        return self.machine.before.name if self.machine.before else ""

    @property
    def rows(self) -> int:
        """How many were checked."""
        return sum(last - first + 1 for first, last in self.checked)


def log(task: Task) -> Path:
    """Every recorded run over the task's grid; `docs/grid.md` is generated from it."""
    return task.path / "docs" / "grid.jsonl"


def runs(task: Task) -> list[GridRecord]:
    """All recorded runs over the task's grid, oldest first.

    Raises:
        LedgerError: a line is no such run, is of another task, or occurs twice.
    """
    records = read(log(task), GridRecord)
    seen: set[str] = set()
    for number, record in enumerate(records, start=1):
        if record.task != task.op:
            raise LedgerError(f"{log(task)}:{number}: expected a run of {task.op}, got one of {record.task}")
        if record.run_id in seen:
            raise LedgerError(f"{log(task)}:{number}: run {record.run_id} is there twice; remove the copy")
        seen.add(record.run_id)
    return sorted(records, key=lambda record: record.utc)  # within one second as they were appended


def fingerprint(ids: Iterable[str]) -> str:
    """sha256 of the ids in order, a line each."""
    return hashlib.sha256("".join(f"{name}\n" for name in ids).encode()).hexdigest()


def ranges(numbers: Iterable[int]) -> tuple[Range, ...]:
    """The numbers as the fewest ascending ranges."""
    found: list[Range] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def positions(parts: Iterable[Range]) -> Iterator[int]:
    """Every number of the ranges."""
    for first, last in parts:
        yield from range(first, last + 1)


def failures(run: RunRecord) -> list[RowResult]:
    """Rows of a run over a grid that do not agree with the oracle, or could not be compared with it."""
    return [row for row in run.rows if not agrees(row, run)]


def agrees(row: RowResult, run: RunRecord) -> bool:
    """Whether the subject is right on a row of a grid, on which an opponent may refuse the call.

    The judge takes a RuntimeError for a failure of the GPU. In SGLang's host code it is about the arguments, and
    nothing is launched. The subject has been compared by then: it comes first in every draw.
    """
    if row.verdict is not Verdict.ERROR or row.production or run.partial:
        return row.verdict is Verdict.CORRECT
    subject = row.arms.get(run.settings.subject)
    raised = (f"arm {name!r} raised {HOST_ERROR}" for name in run.settings.against)
    return (
        subject is not None
        and subject.correctness.passed
        and subject.correctness.checks > 0
        and row.reason.startswith(tuple(raised))
        and not GPU_ERROR.search(row.reason)
    )


def opponents_outside(run: RunRecord) -> dict[str, tuple[str, ...]]:
    """Opponent -> rows on which it is outside the tolerance or refuses while the subject is right; none if empty."""
    agreeing = [row for row in run.rows if agrees(row, run)]
    found = {
        arm: tuple(row.id for row in agreeing if not row.arms[arm].correctness.passed) for arm in run.settings.against
    }
    return {arm: ids for arm, ids in found.items() if ids}


def worse_of(one: Worst | None, other: Worst) -> Worst:
    """The larger share of the tolerance with its place, and the larger relative error; the first of equals."""
    if one is None:
        return other
    most = other if other.used > one.used else one
    return most.model_copy(update={"rel_l2": max(one.rel_l2, other.rel_l2)})
