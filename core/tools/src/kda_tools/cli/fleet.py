"""Commands over many GPUs: split work of the other commands over the workers of a Ray cluster."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kda_tools.cli.base import MOST, Rows, command_line, seconds
from kda_tools.cli.base import app as kda

app = typer.Typer(help="Many GPUs: split work over a Ray cluster, on this machine or elsewhere.", no_args_is_help=True)
kda.add_typer(app, name="fleet")


What = Literal["bench", "validate", "tune", "adversaries", "model"]
"""The commands that can be split."""


@app.callback()
def group() -> None:
    """Keep `run` as a subcommand: typer would merge a single command into its group."""


@app.command()
def run(
    what: Annotated[What, typer.Argument(metavar="WHAT", help="bench, validate, tune, adversaries or model.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Tasks, adversaries or models; all when left out.")
    ] = None,
    rows: Rows = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="auto, HOST:PORT or ray://HOST:PORT of a cluster; else a Ray on this machine."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, max=MOST, help="GPUs to use at most; if there is none, workers run on the CPU."),
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", min=1, max=MOST, help="Workers on a machine at most; 1: pieces never share one."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="validate: the whole grid also without a GPU.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="bench: a first look; never published.")] = False,
    parts: Annotated[
        int, typer.Option("--parts", min=1, max=MOST, help="bench: pieces of a task; recorded parts join.")
    ] = 1,
    missing: Annotated[
        int | None,
        typer.Option(
            "--missing",
            metavar="N",
            min=1,
            max=MOST,
            help="bench: only rows that recorded runs lack, at most N in a piece; recorded parts join. A stopped piece "
            "loses all its rows, and every piece takes half a minute to start: for example 12.",
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Append to the logs to which the command on one GPU appends.")
    ] = False,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, max=MOST, help="Times that a piece may be lost before it is given up.")
    ] = 3,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", metavar="SECONDS", min=1, callback=seconds, help="After this time a piece counts as hung."
        ),
    ] = 3600.0,
    limit_s: Annotated[
        float | None,
        typer.Option(
            "--limit-s",
            metavar="SECONDS",
            min=1,
            callback=seconds,
            help="Begin no piece that would probably end after this time.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of events and results; else .cache/fleet/ID.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run of that folder.")
    ] = None,
) -> None:
    """Split work over all GPUs of a cluster, repeat lost pieces, and keep every result."""
    from kda_tools.fleet.open_run import RunOptions
    from kda_tools.fleet.outcome import print_outcome
    from kda_tools.fleet.pieces import Job
    from kda_tools.fleet.run_fleet import run as run_fleet

    wish = RunOptions(
        job=Job(what),
        names=names or (),
        rows=rows or (),
        full=full,
        quick=quick,
        parts=parts,
        missing=missing or 0,
        record=record,
        command=command_line(),
        address=address,
        most=gpus,
        per_node=per_node,
        attempts=attempts,
        timeout_s=timeout_s,
        limit_s=limit_s,
        resume=resume,
        out=out,
    )
    raise typer.Exit(print_outcome(run_fleet(wish)))
