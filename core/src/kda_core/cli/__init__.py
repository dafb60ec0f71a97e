"""The `kda` command. Imports nothing heavy: `kda --help` answers at once."""

import sys
import traceback

import typer

# Importing a module registers its commands, in the order of the help text.
from kda_core.cli import measure, explain, project  # noqa: F401  # isort: skip
from kda_core.cli.base import app
from kda_core.errors import ExitCode, KdaError


def main() -> None:
    """Entry point: runs the app and turns what the user can act on into one message and its exit code."""
    try:
        app()
    except KdaError as error:
        typer.echo(f"kda: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  # Python's own code for it, 1, means incorrect rows here
        from kda_core.cli.failures import explained

        if (told := explained(error)) is None:
            traceback.print_exc()
            sys.exit(ExitCode.INTERNAL)
        typer.echo(f"kda: {told}", err=True)
        sys.exit(told.exit_code)
