"""What every command shares: the app, common arguments, and how paths and the command itself are written down."""

import os
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kda_core import __version__

app = typer.Typer(
    name="kda",
    help="Evidence-first optimisation of the GPU kernels that serving frameworks really run.",
    epilog="Exit codes: 0 every row verified; 1 incorrect or invalid rows, stale results, or rows that moved; "
    "2 bad usage; 3 something is missing (GPU, network, pinned file); 4 a broken or refused ledger line; "
    "5 an arm failed; 70 a bug in kda; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kda {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version; doctor says more.")
    ] = False,
) -> None:
    """Options of `kda` itself."""


class Device(str, Enum):
    """Values of --device."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Op or folder: qknorm_rope, diffusion/k03_qknorm_rope.")]
Rows = Annotated[
    list[str] | None, typer.Option("--rows", metavar="PATTERN", help="Only rows whose id matches; may be repeated.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the run's record there.")]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="TASK", help="Look in this task's ledger alone.")]
DeviceName = Annotated[Device, typer.Option("--device", help="Where to run; auto takes a GPU if there is one.")]


def command_line() -> str:
    """The command for the record, without the folders of absolute paths: they are the machine's, not the run's."""
    return shlex.join(["kda", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def relative(path: Path) -> str:
    """The path as a reader in this folder would write it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def writable(json: Path | None) -> None:
    """Refuse a --json path that cannot be written before the run, not after it."""
    from kda_core.errors import UsageError

    if json is None:
        return
    folder = json.absolute().parent
    if not folder.is_dir() or json.is_dir():
        raise UsageError(f"--json {json}: expected a file in a folder that exists")
    if not os.access(json if json.exists() else folder, os.W_OK):
        raise UsageError(f"--json {json}: expected a place that may be written to")
