"""`kda tune`: choose the rows, compile, measure, and make the record."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kda_core import bench, gpu, jsonl, provenance, tuning
from kda_core.errors import ExitCode, MissingRequirement, UsageError
from kda_core.tasks import Task, checkout_root
from kda_core.tune import sweep as tune
from kda_core.tune import view
from kda_core.tune.measure import FEWEST_ROUNDS, ROUNDS, GraphWatch, measure
from kda_core.tune.records import SweepRecord
from kda_core.tune.trial import Trial, compile_all, fill_cache, trials
from kda_core.workloads import Workload, select

DEVICE = "cuda:0"


@dataclass(frozen=True)
class Request:
    """What a user asks of `kda tune`."""

    task: Task
    rows: Sequence[str] = ()
    """Row patterns; a sweep that leaves rows out is partial."""
    rounds: int | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    limit_s: float | None = None
    """No new row is begun after so many seconds."""
    command: str = ""


@dataclass(frozen=True)
class Plan:
    """The sweeps and rows of a request."""

    request: Request
    trials: tuple[Trial, ...]
    whole: bool
    """Whether these are all rows."""


def run(request: Request) -> ExitCode:
    """On a GPU: measure, record and choose. Without one: compile every candidate for the task's targets."""
    kind = bench.open_session(bench.Request(task=request.task, device=request.device)).kind
    planned = plan(request)
    if kind == "cpu":
        _compile(planned)
        return ExitCode.OK
    record = sweep(planned)
    path = tune.log(request.task)
    jsonl.append(path, record)
    view.say(f"recorded in {path}: {record.seconds:.0f} s")
    if record.usable:
        rederive(request.task)
        return ExitCode.OK
    why = ["some rows were not measured"] * record.partial + list(record.noisy)
    view.say(f"no table follows from it: {'; '.join(why)}")
    tune.write_page(request.task, tune.load(request.task))
    return ExitCode.INTERRUPTED if record.partial and planned.whole and request.limit_s is None else ExitCode.OK


def rederive(task: Task) -> None:
    """Write `tuned.toml` and its page as the recorded sweeps give them, and show the tables."""
    sweeps = tune.load(task)
    tables = tune.derived(task, sweeps)
    written = {tune.tuned(task): tune.write(task, tables), tune.page(task): tune.write_page(task, sweeps)}
    view.print_tables(tables)
    for path, changed in written.items():
        view.say(f"{path}: {'written' if changed else 'unchanged'}")
    records = tune.recorded(task)
    if not records:
        view.say("no sweep is recorded yet: the lines are what somebody wrote")
    elif records[-1].solution != solution_hash(task):
        view.say(f"the solution has changed since the sweep of {records[-1].utc}: `kda tune {task.op}` measures again")


def solution_hash(task: Task) -> str:
    """Content hash of what a sweep measures: the solution without its tables."""
    return provenance.content_hash(task.path / "solution", ["**/*"], without=[tuning.FILE])


def _compile(planned: Plan) -> None:
    targets = [target.capability for target in planned.request.task.config.targets.values()]
    used = compile_all(planned.trials, targets)
    for target in targets:
        view.print_compiled(planned.trials, used, target)
    view.say("UNVERIFIED: a GPU would check every candidate against the oracle, time it on every row, and choose.")


def plan(request: Request) -> Plan:
    """Find out which rows ask which table; a UsageError names a line of a table that no row would decide."""
    if request.rounds is not None and request.rounds < FEWEST_ROUNDS:
        raise UsageError(f"--rounds: expected at least {FEWEST_ROUNDS}, for a spread, got {request.rounds}")
    sweeps = tune.load(request.task)
    every = _rows(request.task, sweeps)
    chosen = select(every, list(request.rows))
    found = [trial for one in sweeps for trial in trials(request.task, one, _own(one, sweeps, chosen))]
    if chosen == every:
        for one in sweeps:
            _expect_decided(request.task, one, [trial for trial in found if trial.sweep is one])
    if not found:
        raise UsageError(f"--rows {' '.join(request.rows)}: none of these rows asks a tuning table")
    return Plan(request, tuple(found), whole=chosen == every)


def _expect_decided(task: Task, one: tune.Sweep[Any], found: Sequence[Trial]) -> None:
    """Raise the UsageError for a line that no row falls into, or whose rows have no candidate in common."""
    for place, bounds in enumerate(one.lines):
        rows = [trial for trial in found if one.line_of(trial.features) == place]
        where = f"{task.path / 'bench' / 'tune.py'}: table {one.table.name!r}"
        line = f"line {place + 1}, at_most {dict(bounds)}"
        if not rows:
            raise UsageError(f"{where}: no row falls into {line}; add one to the sweep's rows")
        if all(None in launches for launches in zip(*(trial.launches for trial in rows), strict=True)):
            raise UsageError(f"{where}: applies: no candidate is tried on all rows of {line}; they decide it together")


def _rows(task: Task, sweeps: Sequence[tune.Sweep[Any]]) -> tuple[Workload, ...]:
    rows = (*task.workloads, *(row for sweep in sweeps for row in sweep.rows))
    ids = [row.id for row in rows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise UsageError(f"{task.path / 'bench' / 'tune.py'}: rows: ids have to be new ones, got {twice}")
    return rows


def _own(sweep: tune.Sweep[Any], sweeps: Sequence[tune.Sweep[Any]], chosen: Sequence[Workload]) -> list[Workload]:
    """Without the rows that another sweep added for its own table."""
    foreign = [row for other in sweeps if other is not sweep for row in other.rows]
    return [row for row in chosen if row not in foreign]


def sweep(planned: Plan) -> SweepRecord:
    """Measure on the GPU, and show every row as soon as it is timed.

    Raises:
        MissingRequirement: the GPU is busy.
    """
    import torch

    request = planned.request
    task, rounds, started = request.task, request.rounds or ROUNDS, time.monotonic()
    before = gpu.read_state(0)
    reason = gpu.busy(before)
    if reason is not None:
        raise MissingRequirement(f"the GPU is busy: {reason}. Wait: a sweep decides by differences of 1%")
    major, minor = torch.cuda.get_device_capability(0)
    git, solution, utc = provenance.git_state(checkout_root()), solution_hash(task), provenance.utc()
    fill_cache(planned.trials, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    view.say(f"compiled: {time.monotonic() - started:.0f} s")
    until = None if request.limit_s is None else started + request.limit_s
    tables, complete = measure(task, planned.trials, GraphWatch(), DEVICE, rounds, until, view.print_row)
    after = gpu.read_state(0, own_pids=[os.getpid()])
    return SweepRecord(
        utc=utc,
        seconds=round(time.monotonic() - started, 1),
        command=request.command,
        commit=git.commit,
        dirty=git.dirty,
        solution=solution,
        capability=major,
        device=before.name,
        versions=provenance.versions(before.driver),
        rounds=rounds,
        partial=not (complete and planned.whole),
        noisy=tuple(gpu.noise(before, after)),
        tables=tuple(tables),
    )
