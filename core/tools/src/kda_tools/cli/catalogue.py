"""Commands on the catalogue of fused ops: search it, compare releases, extract it from the wheels again."""

from pathlib import Path
from typing import Annotated

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import app as kda
from kda_tools.cli.base import relative

app = typer.Typer(
    help="What upstream has fused already: search, compare releases, read the wheels.", no_args_is_help=True
)
kda.add_typer(app, name="catalogue")


@app.command()
def find(
    terms: Annotated[list[str], typer.Argument(metavar="WORDS...", help="For example: norm scale shift.")],
    most: Annotated[int, typer.Option("--most", min=1, help="How many entries at most.")] = 5,
    whole: Annotated[bool, typer.Option("--whole", help="Show every condition, fallback and caller.")] = False,
) -> None:
    """Find fused ops by words: pattern, op, kernel, model, condition."""
    from kda_tools.knowledge import catalogue_find

    found = catalogue_find.find(catalogue_find.known_entries(_root()), " ".join(terms), most)
    if not found:
        raise UsageError(
            f"{' '.join(terms)}: no entry of docs/catalogue has any of these words; try fewer or broader ones"
        )
    for known in found:
        for text in catalogue_find.lines(known, whole):
            typer.echo(text)


@app.command()
def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A release of the catalogue, 0.5.12.post1, or a wheel's file.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
) -> None:
    """Show which fused ops B has lost, won or changed against A."""
    from kda_tools.knowledge import catalogue_diff

    root = _root()
    both = [catalogue_diff.find_release(root, name) for name in (first, second)]
    for text in catalogue_diff.lines(catalogue_diff.difference(both[0], both[1])):
        typer.echo(text)


@app.command()
def update(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; list what differs from the wheels.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Take the wheels from the cache only.")] = False,
) -> None:
    """Read the facts of every pinned release from its wheel again, and make the pages."""
    from kda_judge.contract.tasks import all_tasks
    from kda_tools.knowledge import catalogue_pages, update_facts

    root = _root()
    changed = update_facts.update(root, all_tasks(), check, offline)
    changed += catalogue_pages.publish(root, all_tasks(), check)
    for text in changed:
        typer.echo(text if check else relative(Path(text)))
    if check and changed:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


def _root() -> Path:
    from kda_tools import checkout_folder

    return checkout_folder.root()
