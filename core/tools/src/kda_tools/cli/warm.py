"""`kda warm`: compile kernels before runs need them."""

import os
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from kda_judge.contract.errors import ExitCode
from kda_tools.cli.base import MOST, Rows, app


@app.command()
def warm(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="TASK...", help="Tasks; none: all.")] = None,
    rows: Rows = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, max=MOST, help="Number of processes; by default one for each core."),
    ] = None,
) -> None:
    """Compile what all arms launch on the rows, so that runs find it in the compilers' caches."""
    from kda_judge.contract.errors import MissingRequirement
    from kda_judge.contract.tasks import find_task, find_tasks
    from kda_judge.evidence.gpu_state import has_gpu
    from kda_judge.session import Request, open_session
    from kda_tools.lab.warm_caches import fill
    from kda_tools.project.export.portable import portable

    found = [find_task(name) for name in tasks] if tasks else find_tasks()
    if not has_gpu():
        raise MissingRequirement("needs a GPU; without one `kda compile` compiles for every target")
    with ExitStack() as open_exports:
        sessions = []
        for task in found:
            ports = open_exports.enter_context(portable(task, "solution", {}))
            request = Request(task=task, rows=rows or [], device="cuda", allow_busy=True, ports=ports)
            sessions.append(open_session(request))
        failed = fill(sessions, processes or len(os.sched_getaffinity(0)), partial(typer.echo, err=True))
    if failed:
        typer.echo(f"{failed} processes failed: what these arms launch is compiled when a run gets to it")
        raise typer.Exit(ExitCode.ARM_FAILED)
