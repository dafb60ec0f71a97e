"""`kda knowledge`: what skills, guides, notes and external collections say about some words."""

from typing import Annotated

import typer

from kda_tools.cli.base import MOST, app


@app.command()
def knowledge(
    terms: Annotated[list[str], typer.Argument(metavar="TERMS...", help="For example: register spills triton.")],
    most: Annotated[int, typer.Option("--most", min=1, max=MOST, help="How many passages at most.")] = 8,
) -> None:
    """Search skills, guides, notes and external/: ranked passages with file and line."""
    from kda_tools import checkout_folder
    from kda_tools.knowledge.passages import search

    for hit in search(checkout_folder.root(), " ".join(terms), most):
        typer.echo(f"{hit.passage.place}:{hit.passage.line}: {hit.passage.title}")
        typer.echo(f"    {hit.snippet}")
