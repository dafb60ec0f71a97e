"""Append the results in a fleet's folder to the logs of the tasks.

Each log gets a line once: a line that it already holds, with the same run id or the same content, is skipped. So this
can be repeated after any interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import ledger, provenance, record_log
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_tools.fleet.join_sweeps import join_sweeps
from kda_tools.fleet.pieces import Job, Kind, NodeFacts, Result
from kda_tools.fleet.run_folder import Plan, RunFolder
from kda_tools.lab.adversaries import page, suite
from kda_tools.lab.adversaries.table import ADVERSARIES, Adversary
from kda_tools.lab.grid import grid_record
from kda_tools.lab.grid.grid_record import GridRecord
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.lab.tune.run_sweep import all_rows
from kda_tools.lab.tune.sweep_record import SweepRecord
from kda_tools.models import step_record
from kda_tools.models.known_models import folder as models_folder
from kda_tools.models.step_record import StepRecord
from kda_tools.project.tune_task import rederive

SPAN = ("planned", "finished")
"""Kinds of events: a run took from the first of them to the last, however late it is delivered."""
Appended = tuple[Path, str]
"""Path of a log, and the run id (or the UTC time) of the record that was appended to it."""


def deliver(folder: RunFolder, plan: Plan, facts: NodeFacts, whole: bool) -> list[Appended]:
    """Append what the logs lack. A sweep or the suite is made of all pieces together: it needs `whole`."""
    job = plan.order.job
    done: list[Appended] = []
    if job in EACH:
        for result in folder.results:
            done += EACH[job](_subject(plan, result), result.line)
    elif job is Job.TUNE and whole:
        for op in plan.order.names:
            done += _sweep(find_task(op), plan, [one for one in folder.results if _subject(plan, one) == op])
    elif job is Job.ADVERSARIES and whole:
        done += _suite(folder, plan, facts)
    for path, run in done:
        folder.note("recorded", why=f"{run} in {path.name}")
    return done


def _subject(plan: Plan, result: Result) -> str:
    return next(piece.subject for piece in plan.pieces if piece.id == result.piece)


def _run(op: str, line: str) -> Iterator[Appended]:
    log, record = find_task(op).ledger, RunRecord.model_validate_json(line)
    if record.run_id not in {one.run_id for one in ledger.read(log)}:
        ledger.append(log, record)
        yield log, record.run_id


def _grid(op: str, line: str) -> Iterator[Appended]:
    task, record = find_task(op), GridRecord.model_validate_json(line)
    if record.run_id not in {one.run_id for one in grid_record.runs(task)}:
        record_log.append(grid_record.log(task), record)
        yield grid_record.log(task), record.run_id


def _step(_model: str, line: str) -> Iterator[Appended]:
    log, record = step_record.log(models_folder()), StepRecord.model_validate_json(line)
    if record.run_id not in {one.run_id for one in record_log.read(log, StepRecord)}:
        record_log.append(log, record)
        yield log, record.run_id


EACH: Mapping[Job, Callable[[str, str], Iterator[Appended]]] = {Job.BENCH: _run, Job.VALIDATE: _grid, Job.MODEL: _step}
"""Jobs in which each piece becomes a line of its own in a log."""


def _sweep(task: Task, plan: Plan, results: list[Result]) -> Iterator[Appended]:
    if not results:
        return
    asked = {row for piece in plan.pieces if piece.subject == task.op for row in piece.items}
    rows = [row.id for row in all_rows(task, tune.load(task)) if row.id in asked]
    record: SweepRecord = join_sweeps(results, rows, whole=not plan.order.rows)
    if record in tune.recorded(task):
        return
    record_log.append(tune.log(task), record)
    yield tune.log(task), record.utc
    if record.usable:
        rederive(task)


def adversary_endings(results: Sequence[Result], kind: Kind) -> list[suite.JudgedRow]:
    """How the adversaries ended, in the table's order. If one ended twice, the later ending counts."""
    by_name = {name: ending for result in results for name, ending in json.loads(result.line).items()}
    return [_ending(one, kind, by_name[one.name]) for one in ADVERSARIES if one.name in by_name]


def _ending(one: Adversary, kind: Kind, ending: dict[str, Any]) -> suite.JudgedRow:
    phases = tuple((phase, seconds) for phase, seconds in ending["phases"])
    return suite.JudgedRow(one, kind, Verdict(ending["verdict"]), ending["reason"], ending["changed"], phases)


def _suite(folder: RunFolder, plan: Plan, facts: NodeFacts) -> Iterator[Appended]:
    """Record a whole suite. A part of the suite is not recorded, as on one GPU."""
    kind = plan.order.kind
    found = adversary_endings(folder.results, kind)
    if len(found) < len(suite.chosen(kind, (), ADVERSARIES)):
        return
    begin, *_, end = (event.moment for event in folder.events if event.event in SPAN)
    record = page.SuiteRecord(
        utc=provenance.utc(end),
        seconds=round((end - begin).total_seconds(), 1),
        commit=facts.commit,
        dirty=facts.dirty,
        kind=kind,
        machine=facts.gpu or f"{facts.cpu}, {facts.cores} cores",
        gpus=len({result.gpu for result in folder.results}),
        versions={name: facts.versions[name] for name in page.VERSIONS},
        results={got.adversary.name: got.name for got in found},
        parts=tuple(
            page.SuitePart(names=tuple(json.loads(one.line)), node=one.node, gpu=one.gpu, attempt=one.attempt)
            for one in folder.results
        ),
    )
    if record in page.read(page.RECORDS):
        return
    record_log.append(page.RECORDS, record)
    page.RECORDS.with_suffix(".md").write_text(page.page(page.read(page.RECORDS)), encoding="utf-8")
    yield page.RECORDS, record.utc
