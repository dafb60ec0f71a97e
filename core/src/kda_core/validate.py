"""What `kda validate` checks besides running kernels: the task's files, and that its published numbers hold."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from kda_core import derive, ledger, plots, publish, report, sources
from kda_core.bench import Session, fit
from kda_core.case import output_spec
from kda_core.documents import copied, dead_links, unrecorded
from kda_core.errors import KdaError, LedgerError, UsageError
from kda_core.oracle import load_reference
from kda_core.tasks import Task
from kda_core.tune import sweep as tune
from kda_core.upstream import read_lock
from kda_core.workloads import Workload, select

FILES = ("prompt.md", "config.toml", "bench/workloads.toml", "bench/reference.py", "docs", "pyproject.toml")
"""What every task folder holds, besides the modules of its arms."""


def problems(task: Task) -> list[str]:
    """Everything wrong with the task's files and published numbers, one line each; empty when it is sound.

    Raises:
        LedgerError: the ledger is broken, so that nothing can be said of its numbers; the other lines are in it too.
    """
    found = [f"{task.path / name}: missing" for name in FILES if not (task.path / name).exists()]
    for check in (_contract, _imports, dead_links, unrecorded, tune.problems, _published):
        try:
            found += check(task)
        except LedgerError as error:
            raise LedgerError("\n".join([*found, str(error)])) from None
        except KdaError as error:
            found.append(str(error))
    return found


def remarks(task: Task) -> list[str]:
    """What is no fault and keeps the task from being published, one line each."""
    return [
        f"{task.path / name}: the note of `kda new` still stands; not published until then" for name in copied(task)
    ]


def uncompared(task: Task) -> str | None:
    """Why the published plots were left out of the comparison; None where they were not, or where there are none."""
    return plots.missing() if report.published(task, ledger.read(task.ledger)) else None


def _contract(task: Task) -> list[str]:
    """Config, rows, arm modules and upstream lists."""
    found = []
    ops = task.config.ops
    dtypes = {output_spec(ops[row.op], row, name).dtype for row in task.workloads for name in ops[row.op].outputs}
    for dtype in sorted(dtypes - set(task.config.tolerance)):
        found.append(f"{task.path / 'config.toml'}: missing key 'tolerance.{dtype}': a frozen row has such an output")
    for name, arm in task.config.arms.items():
        module = task.path.joinpath(*arm.module.split("."))
        if not (module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()):
            found.append(f"{task.path / 'config.toml'}: key 'arms.{name}.module': no module {arm.module!r} in the task")
    for pin in task.config.upstream.values():
        read_lock(task.path / pin.files)
    return found


def _imports(task: Task) -> list[str]:
    return sources.problems(task.path / "solution", f"{task.package}.solution")


def _published(task: Task) -> list[str]:
    """The ledger's numbers follow from its samples, are not stale, and are what the generated files show."""
    records = ledger.read(task.ledger)
    found = [f"{task.ledger}: run {record.run_id}: {line}" for record in records for line in derive.mismatches(record)]
    for record in report.published(task, records).values():
        for part in report.stale(task, record):
            found.append(f"{task.ledger}: run {record.run_id} is stale: {part}; record a new run on the GPU")
    return found + publish.publish([task], check=True, draw=plots.missing() is None)


def grid_session(session: Session) -> Session:
    """The session for a grid: the first opponent alone, and one seed for each input family (three draws a row)."""
    settings = session.settings
    few = settings.model_copy(update={"against": settings.against[:1], "seeds": settings.seeds[:1]})
    return replace(session, settings=few)


def grid_rows(session: Session, full: bool) -> tuple[Workload, ...]:
    """The frozen rows and the regression grid: whole on a GPU; on a CPU shrunken, and thinned unless `full`."""
    task = session.request.task
    path = task.path / "bench" / "grid.py"
    wanted = select(whole_grid(session, full), session.request.rows)
    frozen = tuple(row for row in wanted if row in task.workloads)
    rest = tuple(row for row in wanted if row not in task.workloads)
    return (*fit(session, frozen, task.path / "bench" / "workloads.toml"), *fit(session, rest, path))


def whole_grid(session: Session, full: bool) -> tuple[Workload, ...]:
    """Every row that `grid_rows` chooses from, at its full size: the frozen rows, then the grid in its own order."""
    task = session.request.task
    path = task.path / "bench" / "grid.py"
    return _unique((*task.workloads, *_grid(task, path, thin=session.kind == "cpu" and not full)), path)


def _grid(task: Task, path: Path, thin: bool) -> tuple[Workload, ...]:
    if not path.is_file():
        return ()
    load_reference(task)  # makes the task importable, and a grid without an oracle is of no use
    module = importlib.import_module(f"{task.package}.bench.grid")
    rows = tuple(module.grid())
    return tuple(module.thin(rows)) if thin else rows


def _unique(rows: tuple[Workload, ...], path: Path) -> tuple[Workload, ...]:
    ids: set[str] = set()
    for row in rows:
        if row.id in ids:
            raise UsageError(f"{path}: duplicate workload id {row.id!r}")
        ids.add(row.id)
    return rows
