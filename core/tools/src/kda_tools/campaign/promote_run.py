"""The part of a promotion that runs in its own process, in a clean checkout: `python -m MODULE TASK REQUEST ANSWER`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from kda_judge.bench import run
from kda_judge.contract.strict_models import Count, Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import RunRecord
from kda_judge.session import Request, Session, frozen_rows, open_session
from kda_tools.campaign.events import RowOutcome
from kda_tools.campaign.measure import GOOD, measure
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.rules import Rules
from kda_tools.lab.grid.grid_record import GridRecord, failures
from kda_tools.lab.grid.grid_rows import grid_rows, grid_session
from kda_tools.lab.grid.run_grid import record_of
from kda_tools.project.export.portable import portable

COMMAND = "kda campaign promote"


class Wanted(Strict):
    """What the process is asked for."""

    seeds: tuple[int, ...]
    base: str
    """The commit that the campaign began from; the best version is measured against its solution."""
    target: str
    rules: Rules


class Given(Strict):
    """What the process found. Without a GPU, `run` is set only if fresh seeds failed."""

    failure: str | None
    verified_rows: Count
    grid_rows: Count
    run: RunRecord | None = None
    grid: GridRecord | None = None
    before: tuple[RowOutcome, ...] = ()
    """The best version against the solution that the campaign began from."""


def verify(task: Task, wanted: Wanted) -> Given:
    """Verify all frozen rows with fresh seeds, and the grid (thinned without a GPU).

    On a GPU, also make the run to record, with A/A.
    """
    session = with_seeds(open_session(Request(task=task, again=True)), wanted.seeds)
    rows = frozen_rows(session)
    first = run(session, rows, measure=False, command=COMMAND)
    if (wrong := _wrong(first, len(rows))) is not None:
        return Given(failure=f"fresh seeds: {wrong}", verified_rows=len(first.rows), grid_rows=0, run=first)
    grid = grid_session(session)
    chosen = grid_rows(grid, full=grid.kind == "cuda")
    checked = run(grid, chosen, measure=False, command=COMMAND)
    line = record_of(grid, checked, len(chosen)) if grid.kind == "cuda" else None
    given = Given(failure=None, verified_rows=len(first.rows), grid_rows=len(checked.rows), grid=line)
    if (bad := failures(checked)) or len(checked.rows) < len(chosen):
        words = f"{bad[0].id}: {bad[0].reason}" if bad else f"{len(checked.rows)} of {len(chosen)} rows were checked"
        return given.model_copy(update={"failure": f"grid: {words}"})
    if session.kind == "cpu":
        return given
    with portable(task, "solution", {}) as ports:
        whole = with_seeds(open_session(Request(task=task, again=True, ports=ports)), wanted.seeds)
        measured = run(whole, frozen_rows(whole), command=COMMAND)
    found = given.model_copy(update={"run": measured})
    if (wrong := _wrong(measured, len(rows))) is not None:
        return found.model_copy(update={"failure": f"the run: {wrong}"})
    root = task.path.parents[1]
    before = measure(task, wanted.rules, Repository(root), wanted.base, wanted.target)
    return found.model_copy(update={"before": before.rows, "failure": before.failure})


def with_seeds(session: Session, seeds: tuple[int, ...]) -> Session:
    """The session with these seeds after those of the config, which a published run must have."""
    every = tuple(dict.fromkeys((*session.settings.seeds, *seeds)))
    return replace(session, settings=session.settings.model_copy(update={"seeds": every}))


def _wrong(record: RunRecord, expected: int) -> str | None:
    for row in record.rows:
        if row.verdict not in GOOD:
            return f"{row.id}: {row.verdict.value}: {row.reason}"
    return None if len(record.rows) == expected else f"{len(record.rows)} of {expected} rows ended"


def main(folder: str, request: str, answer: str) -> None:
    """Read the request, write the answer."""
    wanted = Wanted.model_validate_json(Path(request).read_text(encoding="utf-8"))
    given = verify(Task(Path(folder)), wanted)
    Path(answer).write_text(given.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
