"""The record of a measured port: a line of the task's `docs/ports.jsonl`, which is outside the contract's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from kda_judge.bench import run
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence import record_log
from kda_judge.evidence.gpu_state import has_gpu, read_state
from kda_judge.evidence.run_record import RunRecord
from kda_judge.session import Request, frozen_rows, open_session
from kda_tools.port.check_port import Grid
from kda_tools.port.port_task import Port
from kda_tools.port.ported_arm import NAME
from kda_tools.port.upstream_tests import UpstreamTest
from kda_tools.publish.report import published_runs

NOT_MEASURED = 'reason = "not measured'
"""Start of the reason of a choice in a `tuned.toml` that nobody has measured yet."""


class Checks(Strict):
    """Results of the grid and the tests of a patch, before anything is timed."""

    patch_sha256: str
    gpu: str | None
    """Name of the GPU; None for a CPU, where few rows run and none of SGLang's tests."""
    grid_asked: int
    """Number of the grid's rows; those neither right nor failed were not checked."""
    grid_right: int
    """Number of rows that the port's kernels did correctly."""
    grid_failed: tuple[str, ...]
    upstream_tests: tuple[UpstreamTest, ...]


class PortRecord(Strict):
    """One measured port."""

    schema_version: int = 1
    layout: str
    """The pinned release whose layout the tree has."""
    strangers: tuple[str, ...]
    """Modules of the tree whose bytes differ from that release's."""
    exact: bool = False
    """Whether upstream's bits were asked for; ops that cannot give them were left out."""
    checks: Checks
    run: RunRecord
    """The arm `ported` beside the solution and the upstream arms, interleaved in one session."""


def patch_hash(port: Port) -> str:
    """sha256 of the whole patch."""
    return hashlib.sha256(port.patch.difference().encode()).hexdigest()


def checks(port: Port, grid: Grid, tests: Sequence[UpstreamTest]) -> Checks:
    """The record of a grid and tests that have just run."""
    return Checks(
        patch_sha256=patch_hash(port),
        gpu=read_state().name if has_gpu() else None,
        grid_asked=grid.asked,
        grid_right=len(grid.taken),
        grid_failed=tuple(row.id for row in grid.failed),
        upstream_tests=tuple(tests),
    )


def read_checks(path: Path, port: Port) -> Checks:
    """The checks that an earlier command wrote to `path`.

    Raises:
        UsageError: the file is no such record, or belongs to another patch; names the file.
    """
    try:
        found = Checks.model_validate_json(path.read_bytes())
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or "file"
        raise UsageError(f"{path}: key {key!r}: {error.errors()[0]['msg']}; expected what --checks wrote") from None
    if found.patch_sha256 != patch_hash(port):
        raise UsageError(
            f"{path}: expected the checks of this patch ({patch_hash(port)[:12]}), got those of "
            f"{found.patch_sha256[:12]}; remove the file to check again"
        )
    return found


def log(task: Task) -> Path:
    """The file of a task's measured ports."""
    return task.path / "docs" / "ports.jsonl"


def records(task: Task) -> list[PortRecord]:
    """All measured ports of a task, oldest first."""
    return record_log.read(log(task), PortRecord)


def demand_gpu() -> None:
    """Raise MissingRequirement if there is no GPU."""
    if not has_gpu():
        raise MissingRequirement("--record: needs a GPU: without one a port is checked, and nothing is measured")


def measure(port: Port, folder: Path, rows: list[str], command: str, quick: bool = False) -> RunRecord:
    """Time the arm in `folder` against the upstream arms and the solution; `quick`: a first look.

    Raises:
        MissingRequirement: there is no GPU.
        UsageError: the rows are all of ops that are not ported.
    """
    demand_gpu()
    against: list[str] = [
        name for name in map(str, ("baseline", "upstream_latest", "solution")) if name in port.task.config.arms
    ]
    request = Request(
        task=port.task,
        rows=rows,
        subject=NAME,
        against=against,
        again=not quick,
        device="cuda",
        ports={NAME: folder},
        quick=quick,
    )
    session = open_session(request)
    chosen = tuple(row for row in frozen_rows(session) if row.op not in port.unported_ops)
    if not chosen:
        raise UsageError(f"--rows: expected rows of {', '.join(sorted(port.modules))}, which are ported, got none")
    return run(session, chosen, command=command)


def keep(port: Port, checked: Checks, measured: RunRecord) -> PortRecord:
    """Append the port's record to the task's file, and return it."""
    made = PortRecord(
        layout=port.tree.layout.value, strangers=port.strangers, exact=port.exact, checks=checked, run=measured
    )
    record_log.append(log(port.task), made)
    return made


def unmeasured(task: Task) -> str | None:
    """A note if nothing of the solution, or not every choice in it, was measured on a GPU; else None."""
    if not published_runs(task) and not log(task).is_file():
        return f"note: {task.folder}: no run on a GPU is published: nobody knows whether it is faster there"
    for path in sorted((task.path / "solution").rglob("tuned*.toml")):
        text = path.read_text(encoding="utf-8")
        if guessed := text.count(NOT_MEASURED):
            lines = text.count("\nreason = ")
            return f"note: {path.relative_to(task.path.parent)}: {guessed} of {lines} choices were not measured"
    return None
