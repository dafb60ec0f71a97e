"""Commands that examine kernels: tune their configurations, profile them, and look for stray memory accesses."""

from pathlib import Path
from typing import Annotated

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import MOST, DeviceName, LimitS, Rows, TaskName, app, command_line, relative


@app.command()
def tune(
    task: TaskName,
    rows: Rows = None,
    rounds: Annotated[int | None, typer.Option(min=3, max=MOST, help="Samples per candidate and row.")] = None,
    device: DeviceName = "auto",
    limit_s: LimitS = None,
    derive: Annotated[
        bool,
        typer.Option(
            "--derive", help="Only make tuned.toml and docs/tuning.md again from the recorded sweeps; no GPU."
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="With --derive: follow the sweeps on this kind of GPU, not on the one that the lines name.",
        ),
    ] = None,
) -> None:
    """Time every configuration of a task's kernels and write the table that the solution reads."""
    from kda_judge.contract.tasks import find_task
    from kda_tools.lab.tune.run_sweep import Request
    from kda_tools.project import tune_task

    found = find_task(task)
    if gpu is not None and not derive:
        raise UsageError(f"--gpu {gpu!r}: expected with --derive; a sweep runs on this machine's GPU")
    if derive:
        tune_task.rederive(found, gpu)
        return
    request = Request(
        task=found, rows=rows or [], rounds=rounds, device=device, limit_s=limit_s, command=command_line()
    )
    raise typer.Exit(tune_task.run(request))


@app.command()
def profile(
    task: TaskName,
    row: Annotated[
        list[str] | None, typer.Option("--row", metavar="ID", help="The row to profile (required); may be repeated.")
    ] = None,
    arm: Annotated[str, typer.Option("--arm", help="The arm to profile.")] = "solution",
    against: Annotated[str, typer.Option("--against", metavar="ARM", help="The arm to compare it with.")] = "baseline",
    reports: Annotated[
        Path | None, typer.Option("--reports", metavar="FOLDER", help="For ncu's own reports; profiles/ if not given.")
    ] = None,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Profile on a busy GPU.")] = False,
) -> None:
    """Profile two arms on a row with Nsight Compute, and append the profile to docs/profile.jsonl."""
    from kda_judge.contract.tasks import checkout_root, find_task
    from kda_judge.evidence import append_only, record_log
    from kda_tools.lab.profile.profile_record import log
    from kda_tools.lab.profile.run_profile import find_rows, open_profile
    from kda_tools.lab.profile.run_profile import profile as run_profile
    from kda_tools.publish.profile_page import section_md

    found = find_task(task)
    if not row:
        ids = ", ".join(one.id for one in found.workloads[:3])
        raise UsageError(f"--row: expected the id of a row, for example {ids}; all: kda list {found.op}")
    wanted = find_rows(found, row)
    folder = reports or (checkout_root() or Path.cwd()) / "profiles"
    session = open_profile(found, arm, against, allow_busy)
    append_only.demand_appendable(log(found))
    for one in wanted:
        record = run_profile(session, one, folder, command_line())
        record_log.append(log(found), record)
        typer.echo(section_md(record))
    typer.echo(f"appended to {relative(log(found))}; its page: kda publish. ncu's reports: {relative(folder)}")


@app.command()
def sanitize(
    task: TaskName,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="PATTERN", help="These rows (grid rows, too) instead of the default choice."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", help="memcheck and racecheck if not given; initcheck, synccheck. May be repeated."),
    ] = None,
    arm: Annotated[
        str, typer.Option("--arm", help="The arm to check; only the solution's result is recorded.")
    ] = "solution",
) -> None:
    """Look for stray accesses and races with compute-sanitizer, and append the result to docs/sanitize.jsonl."""
    from functools import partial

    from kda_judge.contract.tasks import find_task
    from kda_judge.evidence import append_only, record_log
    from kda_tools.lab.sanitize.choose_rows import choose
    from kda_tools.lab.sanitize.run_sanitize import USUAL, open_sanitize, tools_named
    from kda_tools.lab.sanitize.run_sanitize import sanitize as run_sanitize
    from kda_tools.lab.sanitize.sanitize_record import log
    from kda_tools.publish.sanitize_page import findings_text

    found = find_task(task)
    wanted = tools_named(tool) if tool else USUAL
    session = open_sanitize(found, rows or [], arm)
    append_only.demand_appendable(log(found))
    record = run_sanitize(session, choose(session), wanted, command_line(), partial(typer.echo, err=True))
    typer.echo(findings_text(record))
    if arm == "solution":
        record_log.append(log(found), record)
        typer.echo(f"appended to {relative(log(found))}; its page: kda publish")
    raise typer.Exit(ExitCode.UNFIT_ROWS if record.errors else ExitCode.OK)
