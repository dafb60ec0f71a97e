"""Print what a fleet found, as the commands on one GPU print it, and choose the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kda_judge.contract.errors import ExitCode
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_tools.fleet.deliver import adversary_endings
from kda_tools.fleet.pieces import Job, Order, Result
from kda_tools.fleet.run_fleet import FleetOutcome
from kda_tools.lab.grid.grid_record import GridRecord, failures
from kda_tools.models.step_record import StepRecord
from kda_tools.terminal import console, say

SHOWN_FAILURES = 20


def print_outcome(ended: FleetOutcome) -> ExitCode:
    """Print the results; returns the exit code of the worst one, as a single command does."""
    plan, folder = ended.plan, ended.folder
    verdicts = SHOW[plan.order.job](plan.order, folder.results, {piece.id: piece.subject for piece in plan.pieces})
    for piece, (why, _) in ended.schedule.failed.items():
        say(f"{piece}: nothing came of it: {why}")
    for log, run in ended.recorded:
        say(f"recorded {run} in {log.parent.parent.name}/{log.parent.name}/{log.name}; its page: kda publish")
    say(f"{len(folder.complete_pieces)} of {len(plan.pieces)} pieces; {ended.line}")
    if ended.interrupted:
        say(f"not complete: go on by kda fleet run {plan.order.job.value} --resume {folder.path}")
    return _code(ended, set(verdicts))


def _code(ended: FleetOutcome, verdicts: set[Verdict]) -> ExitCode:
    if ended.interrupted:
        return ExitCode.INTERRUPTED
    if ended.schedule.failed:
        return ExitCode(max(code for _, code in ended.schedule.failed.values()))
    if verdicts & {Verdict.ERROR, Verdict.TIMEOUT}:
        return ExitCode.ARM_FAILED
    return ExitCode.UNFIT_ROWS if verdicts & {Verdict.INCORRECT, Verdict.INVALID} else ExitCode.OK


def _runs(_order: Order, results: Sequence[Result], _subjects: Mapping[str, str]) -> Iterable[Verdict]:
    from kda_tools.publish.run_view import print_run

    for result in results:
        record = RunRecord.model_validate_json(result.line)
        print_run(console(), record)
        yield from (row.verdict for row in record.rows)


def _grids(order: Order, results: Sequence[Result], subjects: Mapping[str, str]) -> Iterable[Verdict]:
    for op in order.names:
        lines = [result.line for result in results if subjects[result.piece] == op]
        if order.kind == "cuda":
            grids = [GridRecord.model_validate_json(line) for line in lines]
            checked = sum(grid.rows for grid in grids)
            failed = [(row.id, row.verdict, row.reason) for grid in grids for row in grid.failed]
        else:
            runs = [RunRecord.model_validate_json(line) for line in lines]
            checked = sum(len(run.rows) for run in runs)
            failed = [(row.id, row.verdict, row.reason) for run in runs for row in failures(run)]
        for name, verdict, reason in failed[:SHOWN_FAILURES]:
            say(f"{name}: {verdict.value}: {reason}")
        if len(failed) > SHOWN_FAILURES:
            say(f"... and {len(failed) - SHOWN_FAILURES} more")
        where = "GPUs" if order.kind == "cuda" else "the CPU"
        say(f"{op}: {checked - len(failed)} of {checked} rows agree with the oracle, on {where}")
        yield from (verdict for _, verdict, _ in failed)


def _suite(order: Order, results: Sequence[Result], _subjects: Mapping[str, str]) -> Iterable[Verdict]:
    from kda_tools.lab.adversaries.__main__ import show as print_suite

    found = adversary_endings(results, order.kind)
    print_suite(found, order.kind, sum(result.seconds for result in results), len({one.gpu for one in results}))
    return [Verdict.INVALID] if any(got.wrong for got in found) else []


def _steps(_order: Order, results: Sequence[Result], _subjects: Mapping[str, str]) -> Iterable[Verdict]:
    from kda_tools.models.views import print_step

    for result in results:
        print_step(StepRecord.model_validate_json(result.line))
    return []


def _sweeps(order: Order, results: Sequence[Result], subjects: Mapping[str, str]) -> Iterable[Verdict]:
    for op in order.names:
        mine = [result for result in results if subjects[result.piece] == op]
        say(f"{op}: swept in {len(mine)} pieces; with --record the tables follow from them")
    return []


SHOW: Mapping[Job, Callable[[Order, Sequence[Result], Mapping[str, str]], Iterable[Verdict]]] = {
    Job.BENCH: _runs,
    Job.VALIDATE: _grids,
    Job.TUNE: _sweeps,
    Job.ADVERSARIES: _suite,
    Job.MODEL: _steps,
}
