"""What is kept of a port that was measured: a line of the task's `docs/ports.jsonl`, outside the contract's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from kda_judge.bench import Request, frozen_rows, open_session, run
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence import record_log
from kda_judge.evidence.gpu_state import has_gpu
from kda_judge.evidence.run_record import RunRecord
from kda_tools.port.check_port import Grid
from kda_tools.port.port_task import Port
from kda_tools.port.ported_arm import NAME
from kda_tools.port.upstream_tests import UpstreamTest


class PortRecord(Strict):
    """One measured port."""

    schema_version: int = 1
    layout: str
    """The pinned release whose layout the tree has."""
    strangers: tuple[str, ...]
    """Modules of the tree that were not byte for byte that release's."""
    patch_sha256: str
    grid_right: int
    """Rows of the grid that the port's kernels did on the GPU, and did right."""
    grid_failed: tuple[str, ...]
    upstream_tests: tuple[UpstreamTest, ...]
    run: RunRecord
    """The arm `ported` beside the solution and the upstream arms, interleaved in one session."""


def log(task: Task) -> Path:
    """Where a task's measured ports are."""
    return task.path / "docs" / "ports.jsonl"


def records(task: Task) -> list[PortRecord]:
    """All of them, oldest first."""
    return record_log.read(log(task), PortRecord)


def measure(port: Port, folder: Path, rows: list[str], command: str) -> RunRecord:
    """Time the arm in `folder` against the upstream arms and the solution.

    Raises:
        MissingRequirement: no GPU: nothing is measured without one.
    """
    if not has_gpu():
        raise MissingRequirement("--record: needs a GPU: without one a port is checked, and nothing is measured")
    against: list[str] = [
        name for name in map(str, ("baseline", "upstream_latest", "solution")) if name in port.task.config.arms
    ]
    request = Request(
        task=port.task, rows=rows, subject=NAME, against=against, again=True, device="cuda", ports={NAME: folder}
    )
    session = open_session(request)
    return run(session, frozen_rows(session), command=command)


def keep(port: Port, grid: Grid, tests: Sequence[UpstreamTest], measured: RunRecord) -> PortRecord:
    """Append the line."""
    made = PortRecord(
        layout=port.tree.layout.value,
        strangers=port.strangers,
        patch_sha256=hashlib.sha256(port.patch.difference().encode()).hexdigest(),
        grid_right=len(grid.taken),
        grid_failed=tuple(row.id for row in grid.failed),
        upstream_tests=tuple(tests),
        run=measured,
    )
    record_log.append(log(port.task), made)
    return made
