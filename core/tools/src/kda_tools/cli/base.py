"""Parts that all commands share: the app, common arguments, and how paths and command lines are written."""

import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

import kda_judge
from kda_judge import __version__


class Commands(typer.core.TyperGroup):
    """Commands whose errors on an option say what came; Typer only says what was expected."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            for fault in getattr(error.__cause__, "errors", list)():
                came = repr(fault["input"])
                error.message += f", got {came}" * (came not in error.message)
            raise


app = typer.Typer(
    name="kda",
    cls=Commands,
    help="Measure, check and improve the GPU kernels that serving frameworks run.",
    epilog="Exit codes: 0 every row verified; 1 incorrect or invalid rows, wrong files or published numbers, or rows "
    "that changed; 2 bad usage; 3 something is missing (GPU, network, pinned file); 4 a broken or refused ledger line; "
    "5 an arm failed; 70 a bug in kda; 130 interrupted; 141 nobody read the output to its end.",
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
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Options of `kda` itself."""
    from kda_judge.contract.tasks import checkout_root

    if (warning := foreign(checkout_root())) is not None:
        typer.echo(warning, err=True)


def foreign(root: Path | None) -> str | None:
    """A warning if the harness that is running differs in its files from that of the checkout at `root`; else None."""
    if root is None:
        return None
    theirs, ours = root / "core" / "judge" / "src" / "kda_judge", Path(kda_judge.__file__).parent
    if not theirs.is_dir() or theirs.samefile(ours):
        return None
    import kda_runtime
    import kda_tools

    running = [ours, *(Path(str(package.__file__)).parent for package in (kda_runtime, kda_tools))]
    beside = {folder: root / "core" / folder.name.removeprefix("kda_") / "src" / folder.name for folder in running}
    if all(_same_files(*pair) for pair in beside.items()):
        return None
    return f"kda: warning: this is the harness in {ours}, not that of the checkout {root}; `nox` runs a checkout's own"


def _same_files(one: Path, other: Path) -> bool:
    from kda_judge.contract.errors import UsageError
    from kda_judge.evidence.provenance import content_hash

    try:
        return content_hash(one, ["**/*"]) == content_hash(other, ["**/*"])
    except UsageError:  # no files, or links to folders
        return False


MOST = 10_000
"""Most generations, samples or rounds that an option accepts."""

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="Op or folder: qknorm_rope, k03, diffusion/k03_qknorm_rope.")
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Only ops that can give upstream's bits (`Op.set_exact`), set to give them.")
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--rows", metavar="PATTERN", help="Only rows whose name matches, such as 'qwen*'; may be repeated."),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the run's record there.")]
TaskOption = Annotated[
    str | None, typer.Option("--task", metavar="TASK", help="Look for the run in this task's ledger only.")
]
DeviceName = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto (a GPU if there is one), cpu, cuda, or cuda:INDEX.")
]


def seconds(value: float | None) -> float | None:
    """Callback of options that are a time in seconds: refuses negative and infinite values."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"expected seconds, 0 or more, got {value:g}")
    return value


LimitS = Annotated[
    float | None,
    typer.Option("--limit-s", metavar="SECONDS", callback=seconds, help="Start no row after this time."),
]


def command_line() -> str:
    """The command line for a record. Absolute paths lose their folders, which belong to the machine, not to the run."""
    return shlex.join(["kda", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def relative(path: Path) -> str:
    """The path as a reader in this folder would write it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def recordable(log: Path | None) -> None:
    """Before a run: refuse a log that cannot be appended to, and warn if the run may not be published."""
    from kda_judge.contract.tasks import checkout_root
    from kda_judge.evidence.append_only import demand_appendable
    from kda_judge.evidence.provenance import git_state

    if log is None:
        return
    demand_appendable(log)
    state = git_state(checkout_root())
    if state.dirty:
        why = f"the files are not those of commit {state.commit[:10]}"
        then = "its numbers are published only if what it ran is committed unchanged; better commit first"
        typer.echo(f"--record: {why}: {then}", err=True)


def writable(file: Path | None, option: str = "--json", lines: bool = False) -> None:
    """Before a run: refuse a file for its result that cannot be written, or that holds something else.

    `lines`: the result is a line of a ledger, so a new file may be named `.jsonl`.
    """
    from kda_judge.contract.errors import UsageError

    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir() or file.is_dir():
        raise UsageError(f"{option} {file}: expected a file in a folder that exists")
    if not os.access(file if os.path.lexists(file) else folder, os.W_OK):
        raise UsageError(f"{option} {file}: expected a place that may be written to")
    holds = file.is_file() and file.stat().st_size > 0
    ends = file.resolve().suffix if holds else file.suffix  # of a link, its target would be lost
    if (holds and ends != ".json") or (ends == ".jsonl" and not lines):
        raise UsageError(f"{option} {file}: would replace a file of another kind; expected a new file, named NAME.json")
