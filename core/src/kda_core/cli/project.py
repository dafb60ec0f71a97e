"""Commands around the tasks: find, fetch, copy, publish, keep."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kda_core.cli.base import TaskName, app, relative
from kda_core.errors import ExitCode, UsageError

ledger_app = typer.Typer(help="Work on a task's ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")


@app.command("list")
def list_tasks(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="List this task's arms and rows.")] = None,
) -> None:
    """List the tasks, or the arms and frozen rows of one."""
    from kda_core.tasks import all_tasks, find_task
    from kda_core.terminal import print_rows, print_tasks

    if task is not None:
        print_rows(find_task(task))
    elif wrong := print_tasks(all_tasks()):
        raise UsageError("\n".join(wrong))


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
    from kda_core.tasks import all_tasks, checkout_root, find_task

    cache = upstream.cache_folder(checkout_root())
    chosen = [find_task(task)] if task else all_tasks()
    pinned = {pin.wheel for one in chosen for pin in one.config.upstream.values()}
    for path in wheel or ():
        if path.name not in pinned or not path.is_file():
            raise UsageError(f"--wheel {path}: expected a file with a pinned name, {' or '.join(sorted(pinned))}")
    for one in chosen:
        for name, pin in one.config.upstream.items():
            given = next((path for path in wheel or () if path.name == pin.wheel), None)
            root = upstream.fetch(pin, one.path / pin.files, cache, offline=offline, refresh=refresh, wheel=given)
            count = len(upstream.read_lock(one.path / pin.files))
            typer.echo(f"{one.op}: {name}: {count} files verified in {relative(root)}")


@app.command()
def new(
    source: Annotated[str, typer.Argument(help="The task to copy.")],
    name: Annotated[str, typer.Argument(help="The new op, for example gelu or llm/k01_gelu.")],
) -> None:
    """Start a new task as a copy of another one."""
    from kda_core.scaffold import new_task
    from kda_core.tasks import find_task

    path = new_task(find_task(source), name)
    typer.echo(f"{relative(path)}: read prompt.md, then config.toml, and change them first")


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
    from kda_core.tasks import all_tasks

    changed = generate(all_tasks(), check=check)
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

    try:  # before the minute that building takes
        out.mkdir(parents=True, exist_ok=True)
        if not any(out.iterdir()):
            out.rmdir()
    except OSError as error:
        raise UsageError(f"--out {out}: expected a place for a folder, got: {error.strerror}") from None
    typer.echo(f"{build(out)} pages: {relative(out.absolute() / 'index.html')}")


@ledger_app.command("merge")
def merge_ledger(
    task: TaskName,
    other: Annotated[
        Path, typer.Argument(metavar="FILE", help="A ledger from another machine, or what --json wrote there.")
    ],
) -> None:
    """Append the runs that FILE has and the task's ledger lacks, byte for byte; all of them, or none."""
    from kda_core import ledger
    from kda_core.tasks import find_task

    found = find_task(task)
    new = ledger.merge(found.ledger, other, partial(ledger.unfit, op=found.op))
    typer.echo(f"{new} new run{'s'[: new != 1]} in {relative(found.ledger)}")
