"""The checks of `kda validate` that run no kernel: the task's files, and whether its published numbers hold."""

from __future__ import annotations

from fnmatch import filter as filter_names

from kda_judge.arms.upstream import read_lock
from kda_judge.contract import solution_imports
from kda_judge.contract.errors import KdaError, LedgerError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger
from kda_judge.evidence.record_log import read
from kda_judge.evidence.run_record import RunRecord
from kda_judge.judge.open_row import output_spec
from kda_tools.lab import tried_record
from kda_tools.project import check_tuning, launch_scripts
from kda_tools.publish import generate, plots, report, task_claims
from kda_tools.publish.task_notes import dead_links, leftovers, unrecorded

FILES = ("prompt.md", "config.toml", "bench/workloads.toml", "bench/reference.py", "docs", "pyproject.toml")
"""Files and folders that every task has, besides the modules of its arms."""


def problems(task: Task) -> list[str]:
    """Everything wrong with the task's files and published numbers, one line each; empty when it is sound.

    Raises:
        LedgerError: the ledger is broken, so its numbers cannot be checked; the message has the other lines, too.
    """
    found = [f"{task.path / name}: missing" for name in FILES if not (task.path / name).exists()]
    for check in (
        _contract,
        _imports,
        dead_links,
        unrecorded,
        check_tuning.problems,
        launch_scripts.problems,
        _published,
    ):
        try:
            found += check(task)
        except LedgerError as error:
            raise LedgerError("\n".join([*found, str(error)])) from None
        except KdaError as error:
            found.append(str(error))
    return found


def remarks(task: Task) -> list[str]:
    """What is not a fault but worth knowing, one line each: reasons not to publish, and stale results."""
    left = [f"{line}; not published until then" for line in leftovers(task)]
    return [*left, *_stale(task)]


def uncompared(task: Task) -> str | None:
    """Why published plots cannot be compared; None if they can, or if there are none."""
    return plots.missing() if report.published_runs(task) else None


def _contract(task: Task) -> list[str]:
    """What is wrong with config, rows, arm modules and upstream lists."""
    found = []
    ops = task.config.ops
    dtypes = {
        output_spec(ops[row.op], row, name).dtype
        for row in task.workloads
        for name in ops[row.op].outputs
        if ops[row.op].tolerated(name)
    }
    for dtype in sorted(dtypes - set(task.config.tolerance)):
        found.append(f"{task.path / 'config.toml'}: missing key 'tolerance.{dtype}': a frozen row has such an output")
    for name, arm in task.config.arms.items():
        module = task.path.joinpath(*arm.module.split("."))
        if not (module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()):
            found.append(f"{task.path / 'config.toml'}: key 'arms.{name}.module': no module {arm.module!r} in the task")
    names = [row.id for row in task.workloads]
    for name, target in task.config.targets.items():
        for pattern in target.times_as_fast:
            if not filter_names(names, pattern):
                where = f"{task.path / 'config.toml'}: key 'targets.{name}.times_as_fast'"
                found.append(f"{where}: expected patterns of frozen rows, got {pattern!r}, which no row fits")
    for pin in task.config.upstream.values():
        read_lock(task.path / pin.files)
    return found


def _imports(task: Task) -> list[str]:
    return solution_imports.problems(task.path / "solution", f"{task.folder}.solution")


def _published(task: Task) -> list[str]:
    """Runs with numbers or claims that cannot be true, limits that fail, and the task's generated files that differ."""
    changes = tried_record.log(task)
    found = [
        f"{path}:{number}: run {record.run_id}: {line}"
        for path, runs in (
            (task.ledger, ledger.read(task.ledger)),
            (changes, [one.run for one in read(changes, tried_record.TriedRecord)]),
        )
        for number, record in enumerate(runs, start=1)
        if record.task == task.op  # `generate` and `leftovers` report runs of other tasks
        for line in task_claims.problems(task, record)
    ]
    found += [line for record in _current(task) for line in _unkept(task, record)]
    return found + generate.publish([task], check=True, draw=plots.missing() is None, shared=False)


def _current(task: Task) -> list[RunRecord]:
    """The published runs that are not stale; `_stale` reports the others."""
    runs = report.published_runs(task).values()
    return [record for record in runs if not report.stale(task, record)]


def _unkept(task: Task, record: RunRecord) -> list[str]:
    """Limits that a published run has passed, and promises on numerics that it shows to be broken."""
    passed = report.passed_limit(record)
    found = [f"{task.ledger}: run {record.run_id}: {passed}"] if passed else []
    if task.config.task.numerics == "exact":
        first = record.settings.against[0]
        for row in record.rows:
            if other := [one for one in row.arms[first].distance if one.equal < 1]:
                found.append(
                    f"{task.path / 'config.toml'}: key 'task.numerics': expected {first}'s bits, as 'exact' promises, "
                    f"got {other[0].ulps} ulp in {other[0].output!r} of row {row.id}"
                )
    return found


def _stale(task: Task) -> list[str]:
    """Parts that have changed since a published run measured them."""
    return [
        f"{task.ledger}: run {record.run_id} is stale: {part}; record a new run on the GPU"
        for record in report.published_runs(task).values()
        for part in report.stale(task, record)
    ]
