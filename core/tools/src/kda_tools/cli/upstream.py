"""`kda upstream`: compare other releases with the pinned ones."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import app as kda

app = typer.Typer(help="Other SGLang releases than the pinned ones.", no_args_is_help=True)
kda.add_typer(app, name="upstream")


@app.callback()
def _group() -> None:
    """Other SGLang releases than the pinned ones."""


@app.command()
def check(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A release of SGLang, or latest.")],
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="TASK", help="Only this task; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the tables there as well.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="On a GPU: a first look at the times.")] = False,
) -> None:
    """Say what a release changed of the pinned files; on a GPU, also which wins shrank or died.

    Markdown goes to standard output, progress to standard error. Exit code 1: a function is gone, or can no longer be
    imported.
    """
    from kda_judge.arms.upstream import cache_folder
    from kda_judge.contract.tasks import all_tasks, checkout_root, find_task
    from kda_judge.evidence.gpu_state import has_gpu
    from kda_tools.port import upstream_check, upstream_wins

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UsageError(f"--out {out}: expected a file in a folder that exists")
    tasks = [find_task(name) for name in task] if task else all_tasks()
    cache, say = cache_folder(checkout_root()), partial(typer.echo, err=True)
    say(f"the wheel of {version} ...")
    release, wheel = upstream_check.find_wheel(version, tasks, cache)
    checked = upstream_check.check(tasks, release, wheel, cache, say)
    parts = [f"# sglang {release} beside the pinned releases\n", upstream_check.table(checked, release)]
    if not has_gpu():
        parts.append("No GPU here: nothing was measured, so nothing is said of the wins.\n")
    for one in checked if has_gpu() else ():
        if one.fits:
            say(f"{one.task.op}: measured on the GPU ...")
            parts.append(upstream_wins.wins(one, upstream_wins.measure(one, release, wheel, quick)))
    typer.echo("\n".join(parts), nl=False)
    if out is not None:
        out.write_text("\n".join(parts), encoding="utf-8")
    raise typer.Exit(ExitCode.OK if all(one.fits for one in checked) else ExitCode.UNFIT_ROWS)
