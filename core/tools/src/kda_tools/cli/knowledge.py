"""`kda knowledge`: what skills, guides, notes and external collections say about some words."""

from typing import Annotated

import typer

from kda_judge.contract.errors import UsageError
from kda_tools.cli.base import app


@app.command()
def knowledge(
    terms: Annotated[list[str], typer.Argument(metavar="TERMS...", help="For example: register spills triton.")],
    most: Annotated[int, typer.Option("--most", min=1, help="So many passages.")] = 8,
) -> None:
    """Search skills, guides, notes and external/: ranked passages with file and line."""
    from kda_judge.contract.tasks import checkout_root
    from kda_tools.knowledge.passages import search

    root = checkout_root()
    if root is None:
        raise UsageError(
            "kda knowledge: expected a checkout, whose documents it reads; run it inside one, or set KDA_ROOT"
        )
    for hit in search(root, " ".join(terms), most):
        typer.echo(f"{hit.passage.place}:{hit.passage.line}: {hit.passage.title}")
        typer.echo(f"    {hit.snippet}")
