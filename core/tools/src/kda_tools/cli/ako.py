"""`kda campaign ako`: export a task to AKO4ALL and import the result."""

from pathlib import Path
from typing import Annotated

import typer

from kda_tools.cli.base import TaskName, relative
from kda_tools.cli.campaign import app as campaign

app = typer.Typer(help="Work on a task with AKO4ALL, and bring the best version back.", no_args_is_help=True)
campaign.add_typer(app, name="ako")
Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A new folder, or a checkout by diffusion/scripts/ensure_ako4all_clean.sh."),
]


@app.command("export")
def export_task(task: TaskName, folder: Folder) -> None:
    """Write the task as AKO4ALL wants it: input/, solution/, bench/, context/, ITERATIONS.md, and PROMPT.md."""
    from kda_judge.contract.tasks import find_task
    from kda_tools.port.ako_export import export

    found = find_task(task)
    written = export(found, folder)
    typer.echo(f"{len(written)} files in {relative(folder.absolute())}; bench: python bench/bench_{found.op}.py")


@app.command("import")
def import_task(task: TaskName, folder: Folder) -> None:
    """Bring the best version into the task's solution, and ITERATIONS.md into the record of iterations.

    Its numbers are claims of the agent's: verify and measure with `kda bench` before anything is kept.
    """
    from kda_judge.contract.tasks import find_task
    from kda_tools.campaign.ako_import import bring_back

    found = find_task(task)
    made = bring_back(found, folder)
    typer.echo(f"{len(made)} iterations recorded as claims; docs/iterations.jsonl of {found.folder} has them")
    taken = next((one.iteration for one in made if one.taken), None)
    if taken is None:
        typer.echo("none improved: the solution stays as it is")
    else:
        typer.echo(f"solution/ is that of iteration {taken}; next: kda bench {found.op}")
