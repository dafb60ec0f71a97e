"""The `kda` command. Imports nothing heavy: `kda --help` answers at once."""

import os
import sys
import traceback

import typer

# Importing a module registers its commands, in the order of the help text.
# isort: off
from kda_tools.cli import measure, warm, explain, why, apply, project, campaign, catalogue, knowledge  # noqa: F401
from kda_tools.cli import model, model_trace, model_denoise, llm, llm_kernels, fleet  # noqa: F401
from kda_tools.cli import port, upstream, ako  # noqa: F401

# isort: on
from kda_judge.contract.errors import ExitCode, KdaError
from kda_tools.cli.base import app
from kda_tools.cli.outlive import outliving

FOR_WORKERS = {"QUACK_CACHE_ENABLED": "0"}
"""Settings of libraries that arms import. QuACK's cache of compiled kernels takes a hash of the whole package, and an
arm has only the files that it needs."""


def main() -> None:
    """Entry point: runs the app, and turns errors that the user can act on into one message and an exit code."""
    for name, value in FOR_WORKERS.items():
        os.environ.setdefault(name, value)
    with outliving():
        _run()


def _run() -> None:
    try:
        app()
    except KdaError as error:
        typer.echo(f"kda: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  # Python would exit with 1, which means incorrect rows here
        from kda_tools.cli.failures import explained

        if (explanation := explained(error)) is None:
            traceback.print_exc()
            sys.exit(ExitCode.INTERNAL)
        typer.echo(f"kda: {explanation}", err=True)
        sys.exit(explanation.exit_code)
