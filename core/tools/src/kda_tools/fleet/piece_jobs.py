"""Do a piece of each job, with the functions of the command that does the job on one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kda_judge.contract.tasks import find_task
from kda_tools.fleet.pieces import Answer, Job, Piece, Question

if TYPE_CHECKING:
    from kda_judge.session import Session

PROBE_GENERATIONS = 1
"""Generations of one turn of `interference`, where each turn counts as a generation."""


def bench(question: Question, piece: Piece) -> Answer:
    """`kda bench`: a ledger line."""
    from kda_judge.bench import begin, run
    from kda_judge.evidence import ledger
    from kda_judge.session import Request, open_session
    from kda_tools.project.export.portable import portable

    order, task = question.order, find_task(piece.subject)
    spent: list[str] = []
    begin(order.kind)
    with portable(task, "solution", {}) as ports:
        request = Request(
            task=task,
            rows=list(piece.items),
            device=order.kind,
            again=order.record or question.probe,
            quick=order.quick or question.probe,
            generations=PROBE_GENERATIONS if question.probe else None,
            limits=not question.probe,
            ports={} if question.probe else ports,
            node=question.node,
            attempt=question.attempt,
        )
        session = open_session(request)
        asked = only_walls(session) if question.probe else session
        record = run(asked, command=order.command, spent=spent.append)
    return Answer(line=ledger.encode(record).decode(), complete=not record.partial, spent=" ".join(spent) or None)


def only_walls(session: Session) -> Session:
    """Only the subject and its first opponent, whose walls a probe reads, and few checks: more delays the start."""
    of = session.settings
    less = {"against": of.against[:1], "beside": (), "cold": False, "families": of.families[:1]}
    return replace(session, settings=of.model_copy(update=less))


def validate(question: Question, piece: Piece) -> Answer:
    """`kda validate`: on a GPU a line of `docs/grid.jsonl`, on the CPU the run itself."""
    from kda_judge.bench import begin, run
    from kda_judge.evidence import ledger
    from kda_judge.session import Request, open_session
    from kda_tools.lab.grid.grid_rows import grid_rows, grid_session
    from kda_tools.lab.grid.run_grid import record_of

    order, wanted = question.order, set(piece.items)
    begin(order.kind)
    request = Request(
        task=find_task(piece.subject),
        rows=list(order.rows),
        device=order.kind,
        allow_busy=True,
        node=question.node,
        attempt=question.attempt,
    )
    session = grid_session(open_session(request))
    rows = tuple(row for row in grid_rows(session, order.full) if row.id in wanted)
    record = run(session, rows, measure=False, command=order.command, limit_s=question.limit_s)
    if not record.rows:
        return Answer(failed="interrupted before any row was checked")
    if order.kind == "cuda":
        line = record_of(session, record, len(rows)).model_dump_json()
    else:
        line = ledger.encode(record).decode()
    return _part(line, piece, [row.id for row in record.rows])


def tune(question: Question, piece: Piece) -> Answer:
    """`kda tune`: a sweep of some rows; joined with the others it is a line of `docs/tuning.jsonl`."""
    from kda_tools.lab.tune import run_sweep

    planned = run_sweep.plan(
        run_sweep.Request(
            task=find_task(piece.subject),
            rows=piece.items,
            device="cuda",
            limit_s=question.limit_s,
            command=question.order.command,
        )
    )
    record = run_sweep.sweep(planned, lambda _trial, _times: None)
    asked = [(trial.sweep.table.name, trial.row.id) for trial in planned.trials]
    there = {(table.table, row.row) for table in record.tables for row in table.rows}
    missing = {row for table, row in asked if (table, row) not in there}
    return _part(record.model_dump_json(), piece, [row for row in piece.items if row not in missing])


def adversaries(question: Question, piece: Piece) -> Answer:
    """The adversary suite: how each row ended."""
    from kda_tools.lab.adversaries import suite
    from kda_tools.lab.adversaries.table import ADVERSARIES

    kind = question.order.kind
    ended: dict[str, dict[str, object]] = {}
    try:
        with suite.started(suite.chosen(kind, piece.items, ADVERSARIES), kind) as futures:
            for name, future in futures.items():
                got = future.result()
                ended[name] = {
                    "verdict": got.verdict.value,
                    "reason": got.reason,
                    "changed": got.changed,
                    "phases": got.phases,
                }
    except KeyboardInterrupt:
        if not ended:
            raise
    return _part(json.dumps(ended), piece, list(ended))


def model(question: Question, piece: Piece) -> Answer:
    """`kda model step`: a line of `diffusion/models/docs/steps.jsonl`."""
    from kda_tools.models.known_models import folder, load_models
    from kda_tools.models.run_step import Plan, run

    (release,) = piece.items
    record = run(Plan(piece.subject, release, command=question.order.command), load_models(), folder())
    return Answer(line=record.model_copy(update={"node": question.node, "attempt": question.attempt}).model_dump_json())


def _part(line: str, piece: Piece, finished: list[str]) -> Answer:
    """The answer with a record of the finished items: all, or those finished before Ctrl-C."""
    complete = set(finished) == set(piece.items)
    return Answer(line=line, complete=complete, items=() if complete else tuple(finished))


JOBS: Mapping[Job, Callable[[Question, Piece], Answer]] = {
    Job.BENCH: bench,
    Job.VALIDATE: validate,
    Job.TUNE: tune,
    Job.ADVERSARIES: adversaries,
    Job.MODEL: model,
}
