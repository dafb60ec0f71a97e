"""`kda model trace`: show what a step consists of, from any trace of torch.profiler."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from kda_tools.cli.base import MOST, relative, writable
from kda_tools.cli.model import app


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="TRACE", help="A Chrome trace of torch.profiler, .json or .json.gz.")],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Number of steps in the trace; by default those that the profiler marked, or 1."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many kernels and hotspots to show.")] = 20,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the whole result there.")] = None,
    cards: Annotated[
        Path | None,
        typer.Option("--cards", metavar="DIR", help="Write draft task cards there for what no task covers."),
    ] = None,
    ceiling: Annotated[
        bool,
        typer.Option("--ceiling", help="Show what the step gains if kernels bound by bytes run at the GPU's limit."),
    ] = False,
) -> None:
    """Show where the GPU's time in a trace went, which tasks cover it, and what is worth a new task."""
    from kda_judge.contract.tasks import find_tasks
    from kda_tools import checkout_folder
    from kda_tools.traces import cards as drafts
    from kda_tools.traces import catalogue, trace_view
    from kda_tools.traces.ceiling import ceiling as ceiling_of
    from kda_tools.traces.copy_limit import copy_limit
    from kda_tools.traces.hotspots import hotspots
    from kda_tools.traces.trace_events import collect
    from kda_tools.traces.trace_profile import profile
    from kda_tools.traces.trace_read import TraceFile

    writable(json)
    if cards is not None:
        drafts.empty_folder(cards, "--cards")
    entries = catalogue.load(checkout_folder.root())
    found = profile(collect(TraceFile(file)), steps)
    judged = [(spot, catalogue.judge(spot, entries, found)) for spot in hotspots(found)]
    for line in trace_view.lines(found, judged, top):
        typer.echo(line)
    made, highest = None, None
    limit = copy_limit(found.gpu, find_tasks()) if ceiling or cards is not None else None
    if ceiling:
        highest = ceiling_of(found, judged, limit)
        typer.echo("")
        for line in trace_view.ceiling_lines(highest, top):
            typer.echo(line)
    if cards is not None:
        made = drafts.cards(found, judged, limit)
        paths = drafts.write(made, cards)
        typer.echo("")
        for line in trace_view.card_lines(made, [path.name for path in paths]):
            typer.echo(line)
        typer.echo(f"{len(made)} card{'s'[: len(made) != 1]} in {relative(cards.absolute())}")
    if json is not None:
        whole = trace_view.data(found, judged, made, highest)
        json.write_text(json_format.dumps(whole, indent=1) + "\n", encoding="utf-8")
