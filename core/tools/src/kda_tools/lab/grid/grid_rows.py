"""The rows of a regression grid: the frozen ones and those that `bench/grid.py` makes."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload, select
from kda_judge.session import Session, fit, offered
from kda_tools.lab.task_calls import call_checked


def grid_session(session: Session) -> Session:
    """The session for a grid: only the first opponent, and one seed for each input family (three draws a row).

    The seed is random, so that no code can be written for it. Records and failures name it.
    """
    seeds = (secrets.randbits(31),)
    few = session.settings.model_copy(update={"against": session.settings.against[:1], "seeds": seeds})
    return replace(session, settings=few)


def grid_rows(session: Session, full: bool, thin: bool = False) -> tuple[Workload, ...]:
    """The frozen rows and the regression grid.

    On a GPU the grid is whole, or thinned with `thin`. On a CPU its rows are shrunken, and it is thinned unless `full`.
    """
    task = session.request.task
    path = task.path / "bench" / "grid.py"
    wanted = offered(session, select(whole_grid(session, full, thin), session.request.rows))
    frozen = tuple(row for row in wanted if row in task.workloads)
    rest = tuple(row for row in wanted if row not in task.workloads)
    return (*fit(session, frozen, task.path / "bench" / "workloads.toml"), *fit(session, rest, path))


def whole_grid(session: Session, full: bool, thin: bool = False) -> tuple[Workload, ...]:
    """Every row that `grid_rows` chooses from, at its full size: the frozen rows, then the grid in its own order."""
    task = session.request.task
    path = task.path / "bench" / "grid.py"
    return _unique((*task.workloads, *_grid(task, path, thin=thin or (session.kind == "cpu" and not full))), path)


def _grid(task: Task, path: Path, thin: bool) -> tuple[Workload, ...]:
    if not path.is_file():
        return ()
    module = task.load("bench.grid")
    rows = _rows(call_checked(module, "grid"), f"{path}: grid")
    return _rows(call_checked(module, "thin", rows), f"{path}: thin") if thin else rows


def _rows(given: object, where: str) -> tuple[Workload, ...]:
    rows: list[Workload] = []
    for row in given if isinstance(given, Iterable) else (given,):
        if not isinstance(row, Workload):
            raise UsageError(f"{where}: expected rows, each a Workload, got {reprlib.repr(row)}")
        rows.append(row)
    return tuple(rows)


def _unique(rows: tuple[Workload, ...], path: Path) -> tuple[Workload, ...]:
    ids: set[str] = set()
    for row in rows:
        if row.id in ids:
            raise UsageError(f"{path}: duplicate workload id {row.id!r}")
        ids.add(row.id)
    return rows
