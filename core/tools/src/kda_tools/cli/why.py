"""`kda why`: explain one row on one screen."""

from typing import Annotated

import typer

from kda_tools.cli.base import TaskName, app


@app.command()
def why(
    task: TaskName, row: Annotated[str, typer.Argument(metavar="ROW", help="The row's id: kda list TASK.")]
) -> None:
    """Show on one screen a row's times, its distance to the limit, what bounds it, and what was tried."""
    from kda_judge.contract.tasks import find_task
    from kda_tools.campaign.history import row_history
    from kda_tools.publish import why as screen

    found = find_task(task)
    screen.find_row(found, row)
    typer.echo(screen.why(found, row, row_history(found, row)))
