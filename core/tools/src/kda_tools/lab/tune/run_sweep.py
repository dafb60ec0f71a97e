"""Runs one sweep: chooses the rows, measures, and makes the record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kda_judge import session as sessions
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.contract.workloads import Workload, select
from kda_judge.evidence import gpu_state, provenance
from kda_runtime import tuned_table
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.lab.tune.sweep import Sweep
from kda_tools.lab.tune.sweep_record import RowTimes, SweepRecord
from kda_tools.lab.tune.time_candidates import FEWEST_ROUNDS, ROUNDS, GraphWatch, measure
from kda_tools.lab.tune.trials import Trial, fill_cache, trials
from kda_tools.terminal import say


@dataclass(frozen=True)
class Request:
    """What a user asks of `kda tune`."""

    task: Task
    rows: Sequence[str] = ()
    """Row patterns; a sweep that leaves rows out is partial."""
    rounds: int | None = None
    device: str = "auto"
    limit_s: float | None = None
    """Seconds after which no new row begins."""
    command: str = ""


@dataclass(frozen=True)
class Plan:
    """The sweeps and rows of a request."""

    request: Request
    trials: tuple[Trial, ...]
    whole: bool
    """Whether no row was left out."""
    gpu: int | None
    """Index of the GPU to measure on; None without one."""


def solution_hash(task: Task) -> str:
    """Content hash of what a sweep measures: the solution without its tables."""
    return provenance.content_hash(task.path / "solution", ["**/*"], without=[tuned_table.FILE])


def plan(request: Request) -> Plan:
    """Find out which rows ask which table; a UsageError names a line of a table that no row would decide."""
    session = sessions.open_session(sessions.Request(task=request.task, device=request.device))
    if request.rounds is not None and request.rounds < FEWEST_ROUNDS:
        raise UsageError(f"--rounds: expected at least {FEWEST_ROUNDS}, for a spread, got {request.rounds}")
    sweeps = tune.load(request.task)
    every = all_rows(request.task, sweeps)
    chosen = select(every, list(request.rows))
    found = [trial for one in sweeps for trial in trials(request.task, one, _own(one, sweeps, chosen))]
    if chosen == every:
        for one in sweeps:
            _expect_decided(request.task, one, [trial for trial in found if trial.sweep is one])
    if not found:
        raise UsageError(f"--rows {' '.join(request.rows)}: none of these rows asks a tuning table")
    return Plan(request, tuple(found), whole=chosen == every, gpu=session.gpu)


def _expect_decided(task: Task, one: Sweep[Any], found: Sequence[Trial]) -> None:
    """Raise the UsageError for a line that no row falls into, or whose rows have no candidate in common."""
    for place, bounds in enumerate(one.lines):
        rows = [trial for trial in found if one.line_of(trial.features) == place]
        where = f"{task.path / 'bench' / 'tune.py'}: table {one.table.name!r}"
        line = f"line {place + 1}, at_most {dict(bounds)}"
        if not rows:
            raise UsageError(f"{where}: no row falls into {line}; add one to the sweep's rows")
        if all(None in launches for launches in zip(*(trial.launches for trial in rows), strict=True)):
            raise UsageError(f"{where}: applies: no candidate is tried on all rows of {line}; they decide it together")


def all_rows(task: Task, sweeps: Sequence[Sweep[Any]]) -> tuple[Workload, ...]:
    """The frozen rows, then those that the sweeps add; a UsageError names ids that occur twice."""
    rows = (*task.workloads, *(row for sweep in sweeps for row in sweep.rows))
    ids = [row.id for row in rows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise UsageError(f"{task.path / 'bench' / 'tune.py'}: rows: ids have to be new ones, got {twice}")
    return rows


def _own(sweep: Sweep[Any], sweeps: Sequence[Sweep[Any]], chosen: Sequence[Workload]) -> list[Workload]:
    """The chosen rows without those that another sweep added for its own table."""
    foreign = [row for other in sweeps if other is not sweep for row in other.rows]
    return [row for row in chosen if row not in foreign]


def sweep(planned: Plan, show: Callable[[Trial, RowTimes], None]) -> SweepRecord:
    """Measure on the GPU, and `show` every row as soon as it is timed.

    Raises:
        MissingRequirement: the GPU is busy.
    """
    import torch

    request = planned.request
    task, rounds, started = request.task, request.rounds or ROUNDS, time.monotonic()
    gpu = planned.gpu or 0
    torch.cuda.set_device(gpu)
    before = gpu_state.read_state(gpu, own_pids=[os.getpid()])  # planning may have made a context already
    reason = gpu_state.busy(before)
    if reason is not None:
        raise MissingRequirement(f"the GPU is busy: {reason}. Wait: a sweep decides by differences of 1%")
    major, minor = torch.cuda.get_device_capability(gpu)
    git, solution, utc = provenance.git_state(checkout_root()), solution_hash(task), provenance.utc()
    fill_cache(planned.trials, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    say(f"compiled: {time.monotonic() - started:.0f} s")
    until = None if request.limit_s is None else started + request.limit_s
    tables, complete = measure(task, planned.trials, GraphWatch(), f"cuda:{gpu}", rounds, until, show)
    after = gpu_state.read_state(gpu, own_pids=[os.getpid()])
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
        noisy=tuple(gpu_state.noise(before, after)),
        tables=tuple(tables),
    )
