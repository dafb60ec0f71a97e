"""Commands that run arms through the judge, and compare what came of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_core.cli.base import (
    Device,
    DeviceName,
    Json,
    Rows,
    TaskName,
    TaskOption,
    app,
    command_line,
    relative,
    writable,
)
from kda_core.errors import ExitCode

if TYPE_CHECKING:
    from kda_core.bench import Session
    from kda_core.judge import Progress
    from kda_core.records import RunRecord
    from kda_core.tasks import Task


@app.command()
def bench(
    task: TaskName,
    rows: Rows = None,
    arm: Annotated[str, typer.Option("--arm", help="The arm under test.")] = "solution",
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="ARM", help="Opponent; may be repeated, the first decides.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Rotate through inputs larger than twice the L2.")] = False,
    aa: Annotated[bool, typer.Option("--aa", help="Also time the first opponent against itself.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the run to the task's ledger; implies --aa.")
    ] = False,
    json: Json = None,
    device: DeviceName = Device.AUTO,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Measure on a busy GPU; marked noisy.")] = False,
    generations: Annotated[int | None, typer.Option(min=1, help="Times the workers are started afresh.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per row, arm and generation.")] = None,
) -> None:
    """Verify and measure a task. Without a GPU: verify, compile, and say what a GPU would add."""
    from kda_core.bench import Request, open_session
    from kda_core.errors import MissingRequirement
    from kda_core.tasks import find_task

    found = find_task(task)
    session = open_session(
        Request(
            task=found,
            rows=rows or [],
            subject=arm,
            against=against or [],
            device=device.value,
            cold=cold,
            again=aa or record,
            allow_busy=allow_busy,
            generations=generations,
            samples=samples,
        )
    )
    if record and session.kind == "cpu":
        raise MissingRequirement("--record: needs a GPU; a run without one measures nothing")
    writable(json)
    result = _measure(session)
    _keep(found, result, json, record)
    code = _exit_code(result)
    if session.kind == "cpu" and code is ExitCode.OK:
        _compile(found, rows or [])
    raise typer.Exit(code)


@app.command()
def rerun(
    run: Annotated[str, typer.Argument(metavar="RECORD", help="Id of a recorded run, or how it begins.")],
    task: TaskOption = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare also when files, pins or the GPU are not the record's.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the new run to the task's ledger.")] = False,
    json: Json = None,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Measure on a busy GPU; marked noisy.")] = False,
) -> None:
    """Measure a recorded run once more, with its own settings, and say which rows moved."""
    from kda_core.rerun import find_run, same_session

    found, old = find_run(_tasks(task), run)
    session = same_session(found, old, allow_busy, anyway)
    writable(json)
    new = _measure(session).model_copy(update={"rerun_of": old.run_id})
    _keep(found, new, json, record)
    agreement = _compare(old, new)
    raise typer.Exit(_exit_code(new) or agreement)


@app.command()
def compare(
    old: Annotated[str, typer.Argument(metavar="A", help="Id of a recorded run, or how it begins.")],
    new: Annotated[str, typer.Argument(metavar="B", help="The run to compare with it.")],
    task: TaskOption = None,
) -> None:
    """Compare two recorded runs of a task: which rows moved, by how much, and what else differs."""
    from kda_core.errors import UsageError
    from kda_core.rerun import find_run

    tasks = _tasks(task)
    (one, before), (other, after) = find_run(tasks, old), find_run(tasks, new)
    if one.op != other.op:
        raise UsageError(
            f"expected two runs of one task, got {before.run_id} of {one.op}, {after.run_id} of {other.op}"
        )
    raise typer.Exit(_compare(before, after))


@app.command()
def validate(
    task: TaskName,
    rows: Rows = None,
    full: Annotated[bool, typer.Option("--full", help="The whole grid also without a GPU.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Only files and published numbers; runs no kernel.")] = False,
    json: Json = None,
    device: DeviceName = Device.AUTO,
    limit_s: Annotated[
        float | None,
        typer.Option("--limit-s", metavar="SECONDS", help="Begin no row after it; the others stay unchecked."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Only rows, on a GPU; append what they showed to docs/grid.jsonl.")
    ] = False,
    rest: Annotated[
        bool, typer.Option("--rest", help="With --record: rows that no recorded run of this state has checked.")
    ] = False,
) -> None:
    """Check a task: its files, its published numbers, and every row and regression-grid row against the oracle."""
    from kda_core.bench import Request, open_session, run
    from kda_core.errors import UsageError
    from kda_core.grid.records import failures
    from kda_core.grid.run import demand_gpu, left
    from kda_core.progress import showing
    from kda_core.tasks import find_task
    from kda_core.terminal import print_grid
    from kda_core.validate import grid_rows, grid_session

    if record and static:
        raise UsageError("--record: expected without --static, which runs no row")
    if rest and not record:
        raise UsageError("--rest: expected with --record: rows that were recorded are left out")
    found = find_task(task)
    if not static:  # before the other checks, which may take a minute: what it cannot do it should say at once
        session = grid_session(open_session(Request(task=found, rows=rows or [], device=device.value, allow_busy=True)))
        if record:
            demand_gpu(session)
        writable(json)
        chosen = grid_rows(session, full)
        if rest and not (chosen := left(session, chosen)):
            typer.echo(f"{found.op}: nothing left to check: {_coverage(session)}")
            raise typer.Exit(ExitCode.OK)
    # A recorded run is followed by others, and each leaves docs/grid.md behind its lines until `kda publish`.
    wrong = [] if record else _check_files(found)
    code = ExitCode.UNFIT_ROWS if wrong else ExitCode.OK
    if not static:
        with showing(chosen, 1) as progress:
            result = run(session, chosen, measure=False, progress=progress, command=command_line(), limit_s=limit_s)
        print_grid(result)
        _keep(found, result, json, into_ledger=False)
        if record:
            _keep_grid(session, result, len(chosen))
        code = max(code, _exit_code(result))
        if missing := len(chosen) - len(result.rows):
            why = "interrupted" if result.partial else f"--limit-s {limit_s:g}"
            typer.echo(f"{found.op}: {len(result.rows)} of {len(chosen)} rows checked, {missing} not: {why}")
        failed = ["files and published numbers (named before the rows)"] if wrong else []
        failed += [f"{len(bad)} of {len(result.rows)} rows"] if (bad := failures(result)) else []
        if failed:
            typer.echo(f"{found.op}: failed: {'; '.join(failed)}")
    raise typer.Exit(code)


@app.command()
def compile(task: TaskName, rows: Rows = None) -> None:
    """Compile every kernel of a task ahead of time for each target GPU, and read off how it will use memory there."""
    from kda_core.tasks import find_task

    _compile(find_task(task), rows or [])


def _check_files(task: "Task") -> list[str]:
    """Print what is wrong with the task's files and published numbers, and return it."""
    from kda_core.validate import problems, remarks, uncompared

    wrong = problems(task)
    for line in wrong:
        typer.echo(line, err=True)
    typer.echo(f"{task.op}: files and published numbers: {'wrong' if wrong else 'ok'}")
    for line in remarks(task):
        typer.echo(line)
    if not wrong and (reason := uncompared(task)):
        typer.echo(f"{task.op}: plots not compared: {reason}")
    return wrong


def _keep_grid(session: "Session", result: "RunRecord", asked: int) -> None:
    """Append what the rows of a grid showed to the task's log, and say how much of the grid is checked by now."""
    from kda_core import jsonl
    from kda_core.grid.records import log
    from kda_core.grid.run import record_of

    task = session.request.task
    if not result.rows:
        typer.echo(f"{task.op}: not recorded: no row was checked to the end")
        return
    jsonl.append(log(task), record_of(session, result, asked))
    typer.echo(f"recorded as {result.run_id} in {relative(log(task))}; its page: kda publish")
    typer.echo(f"{task.op}: {_coverage(session)}")


def _coverage(session: "Session") -> str:
    """How much of the grid the recorded runs of this state have checked."""
    from kda_core.grid.digest import headline
    from kda_core.grid.run import coverage

    joined = coverage(session)
    return headline(joined).replace("*", "").replace("`", "") if joined else "no row is recorded yet"


def _tasks(name: str | None) -> "list[Task]":
    """The named task alone, or all."""
    from kda_core.tasks import all_tasks, find_task

    return [find_task(name)] if name else all_tasks()


def _measure(session: "Session") -> "RunRecord":
    """Run the session's frozen rows, watched, and print them."""
    from kda_core.bench import frozen_rows
    from kda_core.progress import showing
    from kda_core.terminal import print_run
    from kda_core.watch import describe, measure

    rows = frozen_rows(session)
    with showing(rows, 2 * session.settings.generations + 1) as progress:
        record = measure(session, rows, progress if session.kind == "cuda" else _rehearsing(progress), command_line())
    print_run(record)
    if record.machine_watch is not None:
        typer.echo(f"the GPU during the run: {describe(record.machine_watch)}")
    return record


def _rehearsing(progress: "Progress") -> "Progress":
    """The same without a GPU, where the judge goes through its steps and keeps no time."""
    return lambda row, phase: progress(row, phase.replace("measure", "rehearse"))


def _compare(old: "RunRecord", new: "RunRecord") -> ExitCode:
    """Print two runs side by side; 1 when they do not agree."""
    from kda_core.compare import compare as compare_runs
    from kda_core.comparison_view import print_comparison
    from kda_core.rerun import notes
    from kda_core.terminal import console

    comparison = compare_runs(old, new)
    print_comparison(console(), comparison, notes(old, new))
    return ExitCode.OK if comparison.agree else ExitCode.UNFIT_ROWS


def _compile(task: "Task", rows: list[str]) -> None:
    from kda_core.aot import compile_task
    from kda_core.oracle import load_reference
    from kda_core.terminal import print_kernels
    from kda_core.workloads import select

    load_reference(task)  # makes the task importable
    targets = [target.capability for target in task.config.targets.values()]
    kernels = compile_task(task.package, select(task.workloads, rows), targets)
    if kernels is None:
        typer.echo("no kernels to compile: solution has no launches(op, inputs, scalars)")
    else:
        print_kernels(kernels)


def _keep(task: "Task", record: "RunRecord", json: Path | None, into_ledger: bool) -> None:
    from kda_core import ledger

    if json is not None:
        json.write_bytes(ledger.encode(record))
        typer.echo(f"record written to {json}")
    if into_ledger:
        ledger.append(task.ledger, record)
        typer.echo(f"recorded as {record.run_id} in {relative(task.ledger)}; bring the tables up to date: kda publish")


def _exit_code(record: "RunRecord") -> ExitCode:
    """130 for a partial run, else the worst of the rows."""
    from kda_core.records import Verdict

    verdicts = {row.verdict for row in record.rows}
    if record.partial:
        return ExitCode.INTERRUPTED
    if verdicts & {Verdict.ERROR, Verdict.TIMEOUT} or not verdicts:
        return ExitCode.ARM_FAILED
    return ExitCode.UNFIT_ROWS if verdicts & {Verdict.INCORRECT, Verdict.INVALID} else ExitCode.OK
