"""Split an order into pieces; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task, all_tasks, find_task
from kda_judge.contract.workloads import Workload, select
from kda_judge.judge.open_row import footprint
from kda_judge.session import Request, open_session
from kda_tools.fleet.pieces import Job, Kind, Order, Piece, cut, deal

LEAST = 1000
"""Rows of a grid in a worker's smallest piece. Fewer do not pay for the start of its arms."""


def names(job: Job, given: Sequence[str], kind: Kind) -> tuple[str, ...]:
    """The given names, or all that make sense on `kind` if none is given.

    Raises:
        UsageError: a name that does not exist.
    """
    if job is Job.ADVERSARIES:
        from kda_tools.lab.adversaries import suite
        from kda_tools.lab.adversaries.table import ADVERSARIES

        known = [one.name for one in ADVERSARIES]
        usual = [one.name for one in suite.chosen(kind, (), ADVERSARIES)]
    elif job is Job.MODEL:
        from kda_tools.models.known_models import load_models

        known = usual = list(load_models().models)
    else:
        found = [find_task(name) for name in given] or all_tasks()
        if job is Job.TUNE and not given:
            from kda_tools.lab.tune.tuning_files import has_sweeps

            found = [task for task in found if has_sweeps(task)]
        return tuple(dict.fromkeys(task.op for task in found))
    for name in given:
        if name not in known:
            near = ", ".join(nearest(name, known))
            raise UsageError(f"{job.value} {name!r}: there is none of this name; nearest: {near}")
    return tuple(dict.fromkeys(given)) or tuple(usual)


def plan(order: Order, workers: int) -> tuple[Piece, ...]:
    """The pieces, the large ones first; always the same for the same order and number of workers.

    Pieces of missing rows stay in the order of the tasks: if time runs out, the first tasks are complete.
    """
    if order.job is Job.ADVERSARIES:
        return _numbered("", cut(order.names, workers))
    if order.job is Job.MODEL:
        from kda_tools.models.known_models import load_models

        known = load_models()
        pairs = [(name, release) for name in order.names for release in known.releases_of(name)]
        return tuple(Piece(id=f"{name} {release}", subject=name, items=(release,)) for name, release in pairs)
    tasks = [find_task(name) for name in order.names]
    if order.job is Job.BENCH:
        found = [piece for task, rows in rows_of(tasks, order.rows) for piece in _bench(order, task, rows)]
    elif order.job is Job.VALIDATE:
        found = [piece for task in tasks for piece in _numbered(task.op, cut(_grid_rows(order, task), workers, LEAST))]
    else:
        found = [piece for task in tasks for piece in _numbered(task.op, deal(_sweep_rows(order, task), workers))]
    return tuple(found if order.missing else sorted(found, key=lambda piece: -len(piece.items)))


def rows_of(tasks: Sequence[Task], patterns: Sequence[str]) -> list[tuple[Task, tuple[Workload, ...]]]:
    """Each task with its rows that fit a pattern, without tasks that have none.

    Raises:
        UsageError: a pattern that fits no row of any task.
    """
    chosen = {row.id for row in select(tuple(row for task in tasks for row in task.workloads), list(patterns))}
    each = ((task, tuple(row for row in task.workloads if row.id in chosen)) for task in tasks)
    return [(task, rows) for task, rows in each if rows]


def _bench(order: Order, task: Task, chosen: Sequence[Workload]) -> list[Piece]:
    rows = [row.id for row in chosen]
    if order.missing:
        rows = _lacking(task, rows)
    if not order.missing and order.parts == 1:
        return [Piece(id=task.op, subject=task.op, items=tuple(rows) if order.rows else ())]
    # Neighbours in a table are of one size. So each part gets rows from all over it, and all take about as long.
    count = ceil(len(rows) / order.missing) if order.missing else min(order.parts, len(rows))
    return list(_numbered(task.op, [tuple(rows[number::count]) for number in range(count)]))


def _lacking(task: Task, rows: list[str]) -> list[str]:
    """Those of these rows that recorded runs on GPUs of this machine's kind lack. The arms are the coming bench's."""
    from kda_tools.project.export.portable import portable
    from kda_tools.publish.joined_runs import rows_without_result

    with portable(task, "solution", {}) as ports:
        return rows_without_result(open_session(Request(task=task, rows=rows, ports=ports)))[0]


def _grid_rows(order: Order, task: Task) -> list[str]:
    """Rows that probably share compiled kernels are neighbours, so that a GPU compiles and loads few of them."""
    from kda_tools.lab.grid.grid_rows import whole_grid

    session = open_session(Request(task=task, device="cpu"))
    rows = select(whole_grid(session, order.full or order.kind == "cuda"), list(order.rows))
    return [row.id for row in sorted(rows, key=_specialised)]


def _specialised(row: Workload) -> tuple[object, ...]:
    """What kernels are usually specialised on: the op, the dtypes, and how many elements lie in a line of memory."""
    return row.op, tuple((name, spec.dtype, spec.shape[-1:]) for name, spec in row.inputs.items())


def _sweep_rows(order: Order, task: Task) -> list[str]:
    """The rows that move the most bytes first: a candidate takes longest on them."""
    from kda_tools.lab.tune import run_sweep

    planned = run_sweep.plan(run_sweep.Request(task=task, rows=order.rows, device="cpu"))
    rows = {trial.row.id: footprint(task.config.ops[trial.row.op], trial.row) for trial in planned.trials}
    return sorted(rows, key=lambda row: -rows[row])


def _numbered(subject: str, parts: Sequence[tuple[str, ...]]) -> tuple[Piece, ...]:
    return tuple(
        Piece(id=f"{subject or 'adversaries'} {number}/{len(parts)}", subject=subject, items=items)
        for number, items in enumerate(parts, start=1)
    )
