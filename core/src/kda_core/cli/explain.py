"""Commands that look into kernels: which configuration, why as fast as it is, does it touch only its own."""

from pathlib import Path
from typing import Annotated

import typer

from kda_core.cli.base import Device, DeviceName, Rows, TaskName, app, command_line, relative
from kda_core.errors import ExitCode, UsageError


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
        bool,
        typer.Option(
            "--derive", help="Only make tuned.toml and docs/tuning.md again from the recorded sweeps; no GPU."
        ),
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
        task=found, rows=rows or [], rounds=rounds, device=device.value, limit_s=limit_s, command=command_line()
    )
    raise typer.Exit(tune_run.run(request))


@app.command()
def profile(
    task: TaskName,
    row: Annotated[
        list[str] | None, typer.Option("--row", metavar="ID", help="The row, not optional; may be repeated.")
    ] = None,
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
    if not row:
        ids = ", ".join(one.id for one in found.workloads[:3])
        raise UsageError(f"--row: expected the id of a row, for example {ids}; all: kda list {found.op}")
    wanted = find_rows(found, row)
    folder = reports or (checkout_root() or Path.cwd()) / "profiles"
    session = open_profile(found, arm, against, allow_busy)
    for one in wanted:
        record = run_profile(session, one, folder, command_line())
        jsonl.append(log(found), record)
        typer.echo(section_md(record))
    typer.echo(f"appended to {relative(log(found))}; its page: kda publish. ncu's reports: {relative(folder)}")


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
    record = run_sanitize(session, choose(session), wanted, command_line(), partial(typer.echo, err=True))
    jsonl.append(log(found), record)
    typer.echo(findings_text(record))
    typer.echo(f"appended to {relative(log(found))}; its page: kda publish")
    raise typer.Exit(ExitCode.UNFIT_ROWS if record.errors else ExitCode.OK)
