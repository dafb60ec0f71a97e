"""`kda port`: make an export a patch to an SGLang tree, and gather what a pull request needs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import DeviceName, Exact, Rows, TaskName, command_line, relative, seconds, writable
from kda_tools.cli.base import app as kda

if TYPE_CHECKING:
    from kda_tools.port.port_record import Checks
    from kda_tools.port.port_task import Port


class _TaskFirst(TyperGroup):
    """Group in which `kda port TASK ...` means `kda port tree TASK ...`: a first word that is no command is a task."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Insert the command name `tree` if it was left out."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["tree", *args])


app = typer.Typer(cls=_TaskFirst, help="Port a kernel to SGLang: `kda port TASK --sglang PATH`.", no_args_is_help=True)
kda.add_typer(app, name="port")


@app.command("tree")
def tree(
    task: TaskName,
    sglang: Annotated[Path, typer.Option("--sglang", metavar="PATH", help="A checkout, or a folder with sglang/.")],
    write: Annotated[bool, typer.Option("--write", help="Write the patch to the tree, if the checks pass.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take this task's patch back, byte for byte.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="On a GPU: measure the port; append to the task's docs/ports.jsonl.")
    ] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run the grid and SGLang's own tests.")] = True,
    checks: Annotated[
        Path | None,
        typer.Option(
            "--checks", metavar="FILE", help="Keep the results of grid and tests there, or use those that it has."
        ),
    ] = None,
    exact: Exact = False,
    quick: Annotated[bool, typer.Option("--quick", help="A thinned grid, and a first look at the times.")] = False,
    limit_s: Annotated[
        float | None,
        typer.Option(
            "--limit-s", min=1, callback=seconds, metavar="SECONDS", help="Begin no row of the grid after this time."
        ),
    ] = None,
    rows: Rows = None,
    device: DeviceName = "auto",
) -> None:
    """Show a task's export as a patch to an SGLang tree, check it, and with --write write it.

    The difference is on standard output, what was checked on standard error. Nothing is written without --write.
    """
    from kda_judge.contract.tasks import find_task
    from kda_tools.port import insertions, port_record
    from kda_tools.port.check_port import arm, check_syntax
    from kda_tools.port.layouts import find_tree
    from kda_tools.port.port_task import make_port
    from kda_tools.port.port_task import undo as take_back

    if undo and (write or record):
        raise UsageError("--undo: expected alone, without --write or --record")
    _demand_possible(record, check, checks)
    found, place = find_task(task), find_tree(sglang)
    if undo:
        for path in take_back(found, place):
            typer.echo(f"{'as before' if (place.repository / path).exists() else 'removed'}: {path}")
        return
    insertions.demand_none(place.repository, found.op)
    typer.echo(f"{found.folder} for {place.root}: making the patch ...", err=True)
    port = make_port(found, place, exact)
    typer.echo(port.patch.difference(), nl=False)
    for path in port.strangers:
        typer.echo(f"note: {path} is not the file of sglang {place.layout.value}; read its part of the patch", err=True)
    check_syntax(port)
    if check:
        with arm(port) as folder:
            checked = _check(port, folder, Wanted(rows or [], device, checks, quick, limit_s))
            if checked.grid_failed:
                raise typer.Exit(ExitCode.UNFIT_ROWS)
            if record:
                typer.echo("times of the port, the solution and upstream ...", err=True)
                measured = port_record.measure(port, folder, rows or [], command_line(), quick=quick)
                port_record.keep(port, checked, measured)
                typer.echo(f"recorded in {relative(port_record.log(port.task))}", err=True)
            if checked.gpu and not all(one.ran for one in checked.upstream_tests):
                raise typer.Exit(ExitCode.UNFIT_ROWS)
    if write:
        insertions.write(port.patch, found.op)
        typer.echo(f"written to {sglang}; `kda port {found.op} --sglang {sglang} --undo` takes it back", err=True)
        if warning := port_record.unmeasured(found):
            typer.echo(warning, err=True)


def _demand_possible(record: bool, check: bool, checks: Path | None) -> None:
    """Before the checks: refuse options whose results could not be measured or kept."""
    from kda_tools.port import port_record

    if record and not check:
        raise UsageError("--record: expected with the checks, without --no-check")
    if record:
        port_record.demand_gpu()
    if checks is not None and not checks.is_file():
        writable(checks, "--checks")


class Wanted(NamedTuple):
    """Which checks of a port to run, and the file that keeps their results."""

    rows: list[str]
    device: str
    checks: Path | None
    quick: bool
    limit_s: float | None


def _check(port: "Port", folder: Path, wanted: Wanted) -> "Checks":
    """Run the grid and SGLang's own tests, or read the results that an earlier command kept."""
    from kda_tools.port import port_record
    from kda_tools.port.check_port import run_grid
    from kda_tools.port.upstream_tests import run_tests

    if wanted.checks is not None and wanted.checks.is_file():
        typer.echo(f"checked before: {wanted.checks}", err=True)
        return port_record.read_checks(wanted.checks, port)
    say = partial(typer.echo, err=True)
    grid = run_grid(port, folder, wanted.rows, wanted.device, thin=wanted.quick, limit_s=wanted.limit_s, say=say)
    typer.echo("\n".join(grid.lines()), err=True)
    tests = run_tests(port, folder, say)
    for one in tests:
        typer.echo(f"SGLang's {one.file}: {one.outcome}", err=True)
    if not tests:
        typer.echo("the tree has no test of SGLang's that names these functions", err=True)
    found = port_record.checks(port, grid, tests)
    if wanted.checks is not None:
        wanted.checks.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return found


@app.command("artifacts")
def artifacts(
    task: TaskName,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new or empty folder.")],
    denoise: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--denoise", metavar="BEFORE AFTER", help="Two runs of `kda model denoise`."),
    ] = None,
    picture: Annotated[
        list[Path] | None, typer.Option("--picture", metavar="FILE", help="A generated image or clip; may be repeated.")
    ] = None,
    overlaps: Annotated[
        list[int] | None,
        typer.Option("--overlaps", min=1, help="An open pull request that the watchlist lacks; may be repeated."),
    ] = None,
) -> None:
    """Gather what a pull request needs: tables, a profile before and after, numerics, provenance, and a draft."""
    from kda_judge.contract.tasks import checkout_root, find_task
    from kda_tools.knowledge.watchlist import pulls_of_task
    from kda_tools.port.artifacts import Given, write

    found, root = find_task(task), checkout_root()
    known = pulls_of_task(root, found.folder) if root is not None else ()
    listed = [pull.number for pull in known if pull.repository == "sgl-project/sglang"]
    given = Given(denoise, tuple(picture or ()), tuple(dict.fromkeys([*(overlaps or ()), *listed])))
    made = write(found, out, given)
    typer.echo(f"{relative(out.absolute())}: {', '.join(made.files)}")
    for one in made.missing:
        typer.echo(f"missing: {one}", err=True)
