"""Commands that run arms through the judge, and compare the recorded runs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kda_judge.contract.errors import ExitCode
from kda_tools.cli.base import (
    MOST,
    DeviceName,
    Json,
    LimitS,
    Rows,
    TaskName,
    TaskOption,
    app,
    command_line,
    recordable,
    relative,
    writable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kda_judge.contract.tasks import Task
    from kda_judge.evidence.run_record import RowResult, RunRecord
    from kda_judge.judge.judge import Progress
    from kda_judge.session import Session

T = TypeVar("T")
AllowBusy = Annotated[
    bool, typer.Option("--allow-busy", help="Measure although the GPU is busy; the run is marked noisy.")
]


@app.command()
def bench(
    task: TaskName,
    rows: Rows = None,
    arm: Annotated[str, typer.Option("--arm", help="The arm under test.")] = "solution",
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against", metavar="ARM", help="The arm to compare with; may be repeated, the first one decides."
        ),
    ] = None,
    port: Annotated[
        list[str] | None,
        typer.Option(
            "--port", metavar="NAME=DIR", help="Add the package in this folder as an arm, for example an export."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: one generation, one seed, few samples. Never published.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part", metavar="I/N", help="Every N-th row, beginning with the I-th; recorded parts are joined."
        ),
    ] = None,
    missing: Annotated[
        int | None,
        typer.Option(
            "--missing",
            metavar="N",
            min=1,
            max=MOST,
            help="At most N rows that recorded runs of these files on such a GPU lack; recorded parts are joined.",
        ),
    ] = None,
    aa: Annotated[bool, typer.Option("--aa", help="Also time the first opponent against itself.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the run to the task's ledger; implies --aa.")
    ] = False,
    tried: Annotated[
        str | None,
        typer.Option(
            "--tried",
            metavar="SENTENCE",
            help="With a changed copy of the solution as --arm and --port, --against solution: append the run to "
            "docs/tried.jsonl, as a change that is not adopted; the sentence says what was changed.",
        ),
    ] = None,
    json: Json = None,
    device: DeviceName = "auto",
    allow_busy: AllowBusy = False,
    generations: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="How often the workers are restarted.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=MOST, help="Samples per row, arm and generation.")] = None,
) -> None:
    """Check a task's outputs and time its arms. Without a GPU: check small shapes and compile the kernels."""
    from kda_judge.bench import begin
    from kda_judge.contract.errors import MissingRequirement, UsageError
    from kda_judge.contract.tasks import find_task
    from kda_judge.contract.workloads import select
    from kda_judge.evidence import record_log
    from kda_judge.session import Request, open_session
    from kda_tools.lab.tried_record import SOLUTION, TriedRecord, log, patch_of
    from kda_tools.project.export.portable import portable

    if record and (port or quick):
        raise UsageError(
            "--record: a task's ledger holds whole runs of its own arms; keep one with --port or --quick by --json FILE"
        )
    found, brought = find_task(task), _ports(port or [])
    if tried is not None and (quick or record or arm not in brought or against != [SOLUTION] or not tried.strip()):
        raise UsageError("--tried: expected a sentence, --port NAME=DIR, --arm NAME and --against solution, no --quick")
    patch = patch_of(found, brought[arm]) if tried else ""
    begin(device)
    with portable(found, arm, brought) as ports:
        request = Request(
            task=found,
            rows=[*_part([row.id for row in select(found.workloads, rows or [])], part)] if part else rows or [],
            subject=arm,
            against=against or [],
            device=device,
            quick=quick,
            again=aa or record,
            allow_busy=allow_busy,
            generations=generations,
            samples=samples,
            ports=ports,
        )
        session = open_session(request)
        if missing is not None:
            session = open_session(replace(request, rows=_missing(session, missing)))
        if (record or tried) and session.kind == "cpu":
            option = "--record" if record else "--tried"
            raise MissingRequirement(f"{option}: needs a GPU; a run without one measures nothing")
        recordable(found.ledger if record else log(found) if tried else None)
        writable(json, lines=True)
        result = _measure(session)
    _keep(found, result, json, record)
    if tried and result.rows:
        record_log.append(log(found), TriedRecord(task=found.op, name=arm, change=tried, patch=patch, run=result))
        typer.echo(f"recorded as {result.run_id} in {relative(log(found))}; its page: kda publish")
    code = _exit_code(result)
    if session.kind == "cpu" and code is ExitCode.OK:
        _compile(found, rows or [])
        for op in _not_interpreted(found):
            typer.echo(f"{op}: the kernel did not run, its language has no interpreter; the plain path was checked")
    raise typer.Exit(code)


@app.command()
def rerun(
    run: Annotated[str, typer.Argument(metavar="RECORD", help="Name of a recorded run, or its first characters.")],
    task: TaskOption = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare even if files, pins or the GPU have changed since.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the new run to the task's ledger.")] = False,
    json: Json = None,
    allow_busy: AllowBusy = False,
) -> None:
    """Measure a recorded run again with the same settings, and say which rows changed."""
    from kda_judge.bench import begin
    from kda_tools.project.export.portable import portable
    from kda_tools.project.rerun import find_run, same_session

    found, old = find_run(_tasks(task), run)
    begin("auto")
    with portable(found, old.settings.subject, {}) as ports:
        session = same_session(found, old, allow_busy, anyway, ports)
        recordable(found.ledger if record else None)
        writable(json, lines=True)
        new = _measure(session).model_copy(update={"rerun_of": old.run_id})
    _keep(found, new, json, record)
    agreement = _compare(old, new)
    raise typer.Exit(_exit_code(new) or agreement)


@app.command()
def compare(
    old: Annotated[str, typer.Argument(metavar="A", help="Name of a recorded run, or its first characters.")],
    new: Annotated[str, typer.Argument(metavar="B", help="The run to compare with it.")],
    task: TaskOption = None,
) -> None:
    """Compare two recorded runs of a task: which rows changed, by how much, and what else differs."""
    from kda_judge.contract.errors import UsageError
    from kda_tools.project.rerun import find_run

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
    full: Annotated[bool, typer.Option("--full", help="Check the whole grid, also without a GPU.")] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Check files and published numbers only; run no kernel.")
    ] = False,
    json: Json = None,
    device: DeviceName = "auto",
    limit_s: LimitS = None,
    record: Annotated[
        bool, typer.Option("--record", help="Check rows on a GPU and append the results to docs/grid.jsonl.")
    ] = False,
    rest: Annotated[
        bool, typer.Option("--rest", help="With --record: only rows that no recorded run of these files has finished.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="Every N-th row, beginning with the I-th. All parts may run at once on one GPU: nothing is timed.",
        ),
    ] = None,
) -> None:
    """Check a task: files, published numbers, and every row of the regression grid against the oracle."""
    from kda_judge.bench import run
    from kda_judge.contract.errors import UsageError
    from kda_judge.contract.tasks import find_task
    from kda_judge.evidence.append_only import demand_appendable
    from kda_judge.session import Request, open_session
    from kda_tools.lab.grid.grid_record import failures, log
    from kda_tools.lab.grid.grid_rows import grid_rows, grid_session
    from kda_tools.lab.grid.run_grid import demand_gpu, unchecked_rows
    from kda_tools.publish.list_views import print_grid
    from kda_tools.publish.progress import row_progress

    if record and static:
        raise UsageError("--record: expected without --static, which runs no row")
    if part and static:
        raise UsageError("--part: expected without --static, which runs no row")
    if rest and not record:
        raise UsageError("--rest: expected with --record: rows that were recorded are left out")
    found = find_task(task)
    if not static:  # before the other checks, which may take a minute: errors should come at once
        session = grid_session(open_session(Request(task=found, rows=rows or [], device=device, allow_busy=True)))
        if record:
            demand_gpu(session)
            demand_appendable(log(found))
        writable(json, lines=True)
        chosen = tuple(_part(grid_rows(session, full), part))
        if rest and not (chosen := unchecked_rows(session, chosen)):
            typer.echo(f"{found.op}: nothing left to check: {_coverage(session)}")
            raise typer.Exit(ExitCode.OK)
    # Recording is done in several runs, and after each docs/grid.md is out of date until `kda publish`.
    wrong = [] if record else _check_files(found)
    code = ExitCode.UNFIT_ROWS if wrong else ExitCode.OK
    if not static:
        with row_progress(chosen, 1) as progress:
            result = run(session, chosen, measure=False, progress=progress, command=command_line(), limit_s=limit_s)
        print_grid(result)
        _keep(found, result, json, into_ledger=False)
        if record:
            _keep_grid(session, result, len(chosen))
        bad = failures(result)
        code = max(code, _exit_code(result, bad))
        if missing := len(chosen) - len(result.rows):
            why = "interrupted" if result.partial else f"--limit-s {limit_s:g}"
            typer.echo(f"{found.op}: {len(result.rows)} of {len(chosen)} rows checked, {missing} not: {why}")
        failed = ["files and published numbers (named before the rows)"] if wrong else []
        failed += [f"{len(bad)} of {len(result.rows)} rows"] if bad else []
        if failed:
            typer.echo(f"{found.op}: failed: {'; '.join(failed)}")
    raise typer.Exit(code)


@app.command()
def compile(
    task: TaskName,
    rows: Rows = None,
    arm: Annotated[str, typer.Option("--arm", help="The arm whose kernels are compiled.")] = "solution",
) -> None:
    """Compile every kernel for every target GPU: registers, spills, occupancy, memory accesses."""
    from kda_judge.contract.tasks import find_task

    _compile(find_task(task), rows or [], arm)


def _check_files(task: "Task") -> list[str]:
    """Print what is wrong with the task's files and published numbers, and return it."""
    from kda_tools.project.validate import problems, remarks, uncompared
    from kda_tools.publish.read_once import unchanged_files

    with unchanged_files():
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
    """Append the results of grid rows to the task's log, and print how much of the grid is checked by now."""
    from kda_judge.evidence import record_log
    from kda_tools.lab.grid.grid_record import log
    from kda_tools.lab.grid.run_grid import record_of

    task = session.request.task
    if not result.rows:
        typer.echo(f"{task.op}: not recorded: no row was checked to the end")
        return
    record_log.append(log(task), record_of(session, result, asked))
    typer.echo(f"recorded as {result.run_id} in {relative(log(task))}; its page: kda publish")
    typer.echo(f"{task.op}: {_coverage(session)}")


def _coverage(session: "Session") -> str:
    """How much of the grid the recorded runs of this state have checked."""
    from kda_tools.lab.grid.run_grid import coverage
    from kda_tools.publish.grid_page import headline

    joined = coverage(session)
    return headline(joined).replace("*", "").replace("`", "") if joined else "no row is recorded yet"


def _ports(named: list[str]) -> dict[str, Path]:
    """Parse options `NAME=DIR` into name -> folder; a name may occur once."""
    from kda_judge.contract.errors import UsageError

    found: dict[str, Path] = {}
    for word in named:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder) or name in found:
            raise UsageError(f"--port {word!r}: expected NAME=DIR, with another name each time")
        found[name] = Path(folder)
    return found


def _part(items: "Sequence[T]", part: str | None) -> "Sequence[T]":
    """Every N-th item, beginning with the I-th, of `part` I/N; all without it."""
    from kda_judge.contract.errors import UsageError

    if part is None:
        return items
    number, slash, count = part.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"--part {part!r}: expected I/N with I from 1 to N, like 2/3")
    chosen = items[int(number) - 1 :: int(count)]
    if not chosen:
        raise UsageError(f"--part {part}: expected a part that has rows, of {len(items)}")
    return chosen


def _missing(session: "Session", most: int) -> list[str]:
    """The ids of at most `most` rows that lack a recorded result; exits if there are none."""
    from kda_tools.publish.joined_runs import rows_without_result
    from kda_tools.terminal import say

    rows, gpu = rows_without_result(session)
    if not rows:
        say(f"{session.request.task.op}: every row has a result of these files on {gpu}")
        raise typer.Exit
    return rows[:most]


def _tasks(name: str | None) -> "list[Task]":
    """Only the named task, or all tasks without a name."""
    from kda_judge.contract.tasks import all_tasks, find_task

    return [find_task(name)] if name else all_tasks()


def _measure(session: "Session") -> "RunRecord":
    """Run the session's frozen rows with progress shown, and print the results."""
    from kda_judge.bench import run
    from kda_judge.session import frozen_rows
    from kda_tools.publish.progress import row_progress
    from kda_tools.publish.run_view import gpu_seen, print_run
    from kda_tools.terminal import console

    rows, spent = frozen_rows(session), list[str]()
    with row_progress(rows, 2 * session.settings.generations + 1) as progress:
        if session.kind == "cuda":
            record = run(
                session, rows, progress=progress, command=command_line(), timed=progress.timed, spent=spent.append
            )
        else:
            record = run(session, rows, progress=_rehearsing(progress), command=command_line(), spent=spent.append)
    print_run(console(), record)
    typer.echo(f"time spent: {spent[0]}")
    if record.machine_watch is not None:
        typer.echo(f"the GPU during the run: {gpu_seen(record.machine_watch)}")
    return record


def _rehearsing(progress: "Progress") -> "Progress":
    """`progress` for a run without a GPU: the judge goes through its steps but keeps no times."""
    return lambda row, phase: progress(row, phase.replace("measure", "rehearse"))


def _compare(old: "RunRecord", new: "RunRecord") -> ExitCode:
    """Print two runs side by side; 1 when they do not agree."""
    from kda_tools.lab.compare_runs import compare as compare_runs
    from kda_tools.project.rerun import comparison_notes
    from kda_tools.publish.comparison_view import print_comparison
    from kda_tools.terminal import console

    comparison = compare_runs(old, new)
    print_comparison(console(), comparison, comparison_notes(old, new))
    return ExitCode.OK if comparison.agree else ExitCode.UNFIT_ROWS


def _not_interpreted(task: "Task") -> list[str]:
    """The solution's ops whose kernels are not in Triton: a run without a GPU never executes them."""
    solution = task.load("solution")
    known = {name: getattr(getattr(solution, name, None), "kda_op", None) for name in task.config.ops}
    return [name for name, op in known.items() if op is not None and op.kernel is None]


def _compile(task: "Task", rows: list[str], arm: str = "solution") -> None:
    from kda_judge.contract.workloads import select
    from kda_tools.lab.inspect.aot import compile_task
    from kda_tools.publish.kernels_view import print_kernels
    from kda_tools.terminal import console

    kernels = compile_task(task, select(task.workloads, rows), task.config.capabilities, arm)
    if kernels is None:
        typer.echo(f"no kernels to compile: {arm} has no launches(op, inputs, scalars)")
    else:
        print_kernels(console(), kernels)


def _keep(task: "Task", record: "RunRecord", json: Path | None, into_ledger: bool) -> None:
    from kda_judge.evidence import ledger

    try:
        if into_ledger:
            ledger.append(task.ledger, record)
            log = relative(task.ledger)
            typer.echo(f"recorded as {record.run_id} in {log}; bring the tables up to date: kda publish")
    finally:  # if one of the two writes fails, on a full disk for example, the other keeps the run
        if json is not None:
            json.write_bytes(ledger.encode(record))
            typer.echo(f"record written to {json}")


def _exit_code(record: "RunRecord", failed: "Sequence[RowResult] | None" = None) -> ExitCode:
    """130 for a partial run, else the exit code of the worst row. With `failed` only these rows count as failed."""
    from kda_judge.evidence.run_record import Verdict

    verdicts = {row.verdict for row in (record.rows if failed is None else failed)}
    if record.partial:
        return ExitCode.INTERRUPTED
    if verdicts & {Verdict.ERROR, Verdict.TIMEOUT} or not record.rows:
        return ExitCode.ARM_FAILED
    return ExitCode.UNFIT_ROWS if verdicts & {Verdict.INCORRECT, Verdict.INVALID} else ExitCode.OK
