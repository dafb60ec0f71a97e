"""The `kda` command. Imports nothing heavy: `kda --help` answers at once."""

import shlex
import sys
import traceback
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_core.errors import ExitCode, KdaError

if TYPE_CHECKING:
    from kda_core.bench import Session
    from kda_core.records import RunRecord
    from kda_core.tasks import Task

app = typer.Typer(
    name="kda",
    help="Evidence-first optimisation of the GPU kernels that serving frameworks really run.",
    epilog="Exit codes: 0 every row verified; 1 incorrect or invalid rows, stale results, or rows that moved; "
    "2 bad usage; "
    "3 something is missing (GPU, network, pinned file); 4 a broken ledger; 5 an arm failed; 70 a bug in kda; "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ledger_app = typer.Typer(help="Work on a task's ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")


class Device(str, Enum):
    """Values of --device."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Op or folder, for example qknorm_rope.")]
Rows = Annotated[
    list[str] | None, typer.Option("--rows", metavar="PATTERN", help="Only rows whose id matches; may be repeated.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the run's record there.")]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="TASK", help="Look in this task's ledger alone.")]
DeviceName = Annotated[Device, typer.Option("--device", help="Where to run; auto takes a GPU if there is one.")]


@app.command("list")
def list_tasks() -> None:
    """List the tasks."""
    from kda_core.tasks import find_tasks
    from kda_core.terminal import print_tasks

    print_tasks(find_tasks())


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
    _writable(json)
    result = _measure(session)
    _keep(found, result, json, record)
    code = _exit_code(result)
    if session.kind == "cpu" and code is ExitCode.OK:
        _compile(found)
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
    _writable(json)
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
) -> None:
    """Check a task: its files, its published numbers, and every row and regression-grid row against the oracle."""
    from kda_core.bench import Request, open_session, run
    from kda_core.progress import showing
    from kda_core.tasks import find_task
    from kda_core.terminal import print_grid
    from kda_core.validate import grid_rows, grid_session, problems, uncompared

    found = find_task(task)
    wrong = problems(found)
    for line in wrong:
        typer.echo(line, err=True)
    typer.echo(f"{found.op}: files and published numbers: {'wrong' if wrong else 'ok'}")
    if not wrong and (reason := uncompared(found)):
        typer.echo(f"{found.op}: plots not compared: {reason}")
    code = ExitCode.UNFIT_ROWS if wrong else ExitCode.OK
    if not static:
        session = grid_session(open_session(Request(task=found, rows=rows or [], device=device.value, allow_busy=True)))
        _writable(json)
        chosen = grid_rows(session, full)
        with showing(chosen, 1) as progress:
            result = run(session, chosen, measure=False, progress=progress, command=_command())
        print_grid(result)
        _keep(found, result, json, into_ledger=False)
        code = max(code, _exit_code(result))
    raise typer.Exit(code)


@app.command()
def tune(
    task: TaskName,
    rows: Rows = None,
    rounds: Annotated[int | None, typer.Option(min=3, help="Samples per candidate and row.")] = None,
    device: DeviceName = Device.AUTO,
    limit_s: Annotated[
        float | None, typer.Option("--limit-s", metavar="SECONDS", help="Begin no row after it; the sweep is partial.")
    ] = None,
    derive: Annotated[
        bool, typer.Option("--derive", help="Only make tuned.toml again from the recorded sweeps; needs no GPU.")
    ] = False,
) -> None:
    """Time every configuration of a task's kernels and write the tables that dispatch reads."""
    from kda_core.tasks import find_task
    from kda_core.tune import run as tune_run

    found = find_task(task)
    if derive:
        tune_run.rederive(found)
        return
    request = tune_run.Request(
        task=found, rows=rows or [], rounds=rounds, device=device.value, limit_s=limit_s, command=_command()
    )
    raise typer.Exit(tune_run.run(request))


@app.command()
def compile(task: TaskName) -> None:
    """Compile every kernel of a task ahead of time for each target GPU."""
    from kda_core.tasks import find_task

    _compile(find_task(task))


@app.command()
def profile(
    task: TaskName,
    row: Annotated[list[str], typer.Option("--row", metavar="ID", help="The row; may be repeated.")],
    arm: Annotated[str, typer.Option("--arm", help="The arm to explain.")] = "solution",
    against: Annotated[str, typer.Option("--against", metavar="ARM", help="The arm beside it.")] = "baseline",
    reports: Annotated[
        Path | None, typer.Option("--reports", metavar="FOLDER", help="For ncu's own reports; profiles/ if not given.")
    ] = None,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Profile on a busy GPU.")] = False,
) -> None:
    """Explain a row: two arms under Nsight Compute, side by side, appended to the task's docs/profile.jsonl."""
    from kda_core import jsonl
    from kda_core.profile.digest import section_md
    from kda_core.profile.records import log
    from kda_core.profile.run import find_rows, open_profile
    from kda_core.profile.run import profile as run_profile
    from kda_core.tasks import checkout_root, find_task

    found = find_task(task)
    wanted = find_rows(found, row)
    folder = reports or (checkout_root() or Path.cwd()) / "profiles"
    session = open_profile(found, arm, against, allow_busy)
    for one in wanted:
        record = run_profile(session, one, folder, _command())
        jsonl.append(log(found), record)
        typer.echo(section_md(record))
    typer.echo(f"appended to {_relative(log(found))}; its page: kda publish. ncu's reports: {_relative(folder)}")


@app.command()
def sanitize(
    task: TaskName,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="PATTERN", help="These rows, of the grid too, instead of the chosen few."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", help="memcheck and racecheck if not given; initcheck, synccheck. May be repeated."),
    ] = None,
) -> None:
    """Look for stray accesses and races: the solution under compute-sanitizer, appended to docs/sanitize.jsonl."""
    from functools import partial

    from kda_core import jsonl
    from kda_core.sanitize.digest import findings_text
    from kda_core.sanitize.records import log
    from kda_core.sanitize.rows import choose
    from kda_core.sanitize.run import USUAL, open_sanitize, tools_named
    from kda_core.sanitize.run import sanitize as run_sanitize
    from kda_core.tasks import find_task

    found = find_task(task)
    wanted = tools_named(tool) if tool else USUAL
    session = open_sanitize(found, rows or [])
    record = run_sanitize(session, choose(session), wanted, _command(), partial(typer.echo, err=True))
    jsonl.append(log(found), record)
    typer.echo(findings_text(record))
    typer.echo(f"appended to {_relative(log(found))}; its page: kda publish")
    raise typer.Exit(ExitCode.UNFIT_ROWS if record.errors else ExitCode.OK)


@app.command()
def fetch(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="One task; all when left out.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Extract again even when the cache is good.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Only check the cache.")] = False,
    wheel: Annotated[
        list[Path] | None, typer.Option("--wheel", metavar="FILE", help="Take the wheel from there; may be repeated.")
    ] = None,
) -> None:
    """Bring the pinned upstream files into the cache; everything works offline afterwards."""
    from kda_core import upstream
    from kda_core.tasks import checkout_root, find_task, find_tasks

    cache = upstream.cache_folder(checkout_root())
    for one in [find_task(task)] if task else find_tasks():
        for name, pin in one.config.upstream.items():
            given = next((path for path in wheel or () if path.name == pin.wheel), None)
            root = upstream.fetch(pin, one.path / pin.files, cache, offline=offline, refresh=refresh, wheel=given)
            count = len(upstream.read_lock(one.path / pin.files))
            typer.echo(f"{one.op}: {name}: {count} files verified in {_relative(root)}")


@app.command()
def new(
    source: Annotated[str, typer.Argument(help="The task to copy.")],
    name: Annotated[str, typer.Argument(help="The new op, for example silu_and_mul or llm/k01_silu_and_mul.")],
) -> None:
    """Start a new task as a copy of another one."""
    from kda_core.scaffold import new_task
    from kda_core.tasks import find_task

    path = new_task(find_task(source), name)
    typer.echo(f"{_relative(path)}: read prompt.md, then config.toml, and change them first")


@app.command()
def doctor() -> None:
    """Show what this machine has, what is missing, and the command that brings it."""
    from kda_core.doctor import checks
    from kda_core.terminal import print_checks

    print_checks(checks())


@app.command()
def publish(
    check: Annotated[bool, typer.Option("--check", help="Only say which files are not what the ledgers give.")] = False,
) -> None:
    """Generate results, plots and tables from the ledgers."""
    from kda_core.publish import publish as generate
    from kda_core.tasks import find_tasks

    changed = generate(find_tasks(), check=check)
    for line in changed:
        typer.echo(line)
    if check and changed:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


@app.command()
def schema(
    check: Annotated[bool, typer.Option("--check", help="Only say which schemas are not what the models say.")] = False,
) -> None:
    """Write the JSON Schemas of the tasks' TOML files and of the ledger's lines."""
    from kda_core.schema import write

    changed = write(check)
    for line in changed:
        typer.echo(line)
    if check and changed:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


@app.command()
def site(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to; an earlier site is replaced.")] = Path(
        "_site"
    ),
) -> None:
    """Build the static site from the ledgers and the documents; it works offline, from files."""
    from kda_core.site import build

    typer.echo(f"{build(out)} pages: {_relative(out.absolute() / 'index.html')}")


@ledger_app.command("merge")
def merge_ledger(
    task: TaskName, other: Annotated[Path, typer.Argument(metavar="FILE", help="A ledger from another machine.")]
) -> None:
    """Append the runs that FILE has and the task's ledger lacks, byte for byte."""
    from kda_core import ledger
    from kda_core.tasks import find_task

    found = find_task(task)
    typer.echo(f"{ledger.merge(found.ledger, other)} new runs in {_relative(found.ledger)}")


def main() -> None:
    """Entry point: runs the app and turns a KdaError into one message and its exit code."""
    try:
        app()
    except KdaError as error:
        typer.echo(f"kda: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001  # Python's own code for it, 1, means incorrect rows here
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)


def _command() -> str:
    """The command for the record, without the folders of absolute paths: they are the machine's, not the run's."""
    return shlex.join(["kda", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _tasks(name: str | None) -> "list[Task]":
    """The named task alone, or all."""
    from kda_core.tasks import find_task, find_tasks

    return [find_task(name)] if name else find_tasks()


def _measure(session: "Session") -> "RunRecord":
    """Run the session's frozen rows, watched, and print them."""
    from kda_core.bench import frozen_rows
    from kda_core.progress import showing
    from kda_core.terminal import print_run
    from kda_core.watch import describe, measure

    rows = frozen_rows(session)
    with showing(rows, 2 * session.settings.generations + 1) as progress:
        record = measure(session, rows, progress, _command())
    print_run(record)
    if record.machine_watch is not None:
        typer.echo(f"the GPU during the run: {describe(record.machine_watch)}")
    return record


def _compare(old: "RunRecord", new: "RunRecord") -> ExitCode:
    """Print two runs side by side; 1 when they do not agree."""
    from kda_core.compare import compare as compare_runs
    from kda_core.comparison_view import print_comparison
    from kda_core.rerun import notes
    from kda_core.terminal import console

    comparison = compare_runs(old, new)
    print_comparison(console(), comparison, notes(old, new))
    return ExitCode.OK if comparison.agree else ExitCode.UNFIT_ROWS


def _compile(task: "Task") -> None:
    from kda_core.aot import compile_task
    from kda_core.terminal import print_kernels

    targets = [target.capability for target in task.config.targets.values()]
    print_kernels(compile_task(task.package, task.workloads, targets))


def _keep(task: "Task", record: "RunRecord", json: Path | None, into_ledger: bool) -> None:
    from kda_core import ledger

    if into_ledger:
        ledger.append(task.ledger, record)
        typer.echo(f"recorded as {record.run_id} in {_relative(task.ledger)}; bring the tables up to date: kda publish")
    if json is not None:
        json.write_bytes(ledger.encode(record))
        typer.echo(f"record written to {json}")


def _writable(json: Path | None) -> None:
    """Refuse a --json path that cannot be written before the run, not after it."""
    from kda_core.errors import UsageError

    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"--json {json}: expected a file in a folder that exists")


def _exit_code(record: "RunRecord") -> ExitCode:
    """130 for a partial run, else the worst of the rows."""
    from kda_core.records import Verdict

    verdicts = {row.verdict for row in record.rows}
    if record.partial:
        return ExitCode.INTERRUPTED
    if verdicts & {Verdict.ERROR, Verdict.TIMEOUT} or not verdicts:
        return ExitCode.ARM_FAILED
    return ExitCode.UNFIT_ROWS if verdicts & {Verdict.INCORRECT, Verdict.INVALID} else ExitCode.OK
