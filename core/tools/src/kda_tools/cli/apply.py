"""`kda apply`: run a command with solutions in place of the framework's functions."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kda_judge.contract.errors import UsageError
from kda_tools.cli.base import Exact, Json, app, writable

FORMS = ("portable", "runtime")


@app.command()
def apply(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run, with its arguments.")
    ] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option(
            "--ops",
            metavar="NAMES",
            help="Only these tasks, such as k03,k05 or their ops; may be repeated. By default all measured ones.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--form", help="portable: the plain export, without a package of ours. runtime: with kda-runtime."
        ),
    ] = "portable",
    exact: Exact = False,
    gpus: Annotated[
        int, typer.Option(min=0, help="How many idle GPUs to choose; none if 0, or if CUDA_VISIBLE_DEVICES is set.")
    ] = 1,
    json: Json = None,
) -> None:
    """Run COMMAND with our kernels in place of the installed SGLang's functions; no file of SGLang is changed.

    A report on standard error says which calls our kernels did, which fell back to SGLang's own function, and why.
    The exit code is the command's, or 3 if nothing could be replaced.
    """
    from kda_judge.contract.tasks import all_tasks
    from kda_tools.models import apply_run, apply_site
    from kda_tools.project.export.sources import collect, with_plain_tables
    from kda_tools.project.preflight import demand_release, environment

    if form not in FORMS:
        raise UsageError(f"--form: expected {' or '.join(FORMS)}, got {form!r}")
    program = apply_run.found_command(command or [])
    every = all_tasks()
    tasks = apply_site.chosen_tasks(every, ops or [])
    writable(json)
    if not ops and (left := [task.op for task in every if task not in tasks]):
        typer.echo(f"kda apply: left out, since no GPU has measured it: {', '.join(left)}; --ops chooses it", err=True)
    plan = [*apply_site.replacements(tasks), *apply_site.sites(tasks)]
    plan = apply_site.exact_only(tasks, plan) if exact else plan
    if not plan:
        raise UsageError(f"--ops: {', '.join(task.op for task in tasks)} has no arm on a release of sglang to replace")
    functions: dict[str, list[str]] = {}
    for one in plan:
        functions.setdefault(one.version, []).append(one.function)
    known = list(functions)
    demand_release(program[0], known, absent_ok=True)
    runtime = form == "runtime"
    by_op = {one.task: task for one in plan for task in tasks if task.op == one.task}
    solutions = {op: collect(task, runtime, exact) for op, task in by_op.items()}
    if not runtime:
        solutions = {op: with_plain_tables(by_op[op], files) for op, files in solutions.items()}
    with TemporaryDirectory(prefix="kda-apply-") as temporary:
        site, counts = Path(temporary) / "site", Path(temporary) / "counts"
        counts.mkdir()
        apply_site.write(site, plan, solutions, runtime)
        done = apply_run.run(program, site, counts, functions, form, environment(gpus))
    if json is not None:
        json.write_text(done.model_dump_json(indent=1) + "\n", encoding="utf-8")
    typer.echo("\n".join(apply_run.lines(done)), err=True)
    apply_run.demand_applied(done, known)
    raise typer.Exit(done.exit_code)
