"""Commands on tasks and the checkout: list, fetch, lock, copy, export, publish, and more."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import Exact, TaskName, app, relative

if TYPE_CHECKING:
    from kda_judge.contract.tasks import Task

ledger_app = typer.Typer(help="Work on a task's ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")
WheelFiles = Annotated[
    list[Path] | None,
    typer.Option("--wheel", metavar="FILE", help="Use this wheel instead of downloading it; may be repeated."),
]


@app.command("list")
def list_tasks(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="List this task's arms and rows.")] = None,
) -> None:
    """List the tasks, or the arms and frozen rows of one."""
    from kda_judge.contract.tasks import all_tasks, find_task
    from kda_tools.publish.list_views import print_rows, print_tasks

    if task is not None:
        print_rows(find_task(task))
    elif wrong := print_tasks(all_tasks()):
        raise UsageError("\n".join(wrong))


@app.command()
def fetch(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="One task; all when left out.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Extract again even if the cache is complete.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Only check the cache.")] = False,
    wheel: WheelFiles = None,
) -> None:
    """Download the pinned upstream files into the cache; everything works offline afterwards."""
    from kda_judge.arms import upstream
    from kda_judge.contract.tasks import all_tasks, checkout_root, find_task

    cache = upstream.cache_folder(checkout_root())
    chosen = [find_task(task)] if task else all_tasks()
    wheels = _wheels(chosen, wheel)
    for one in chosen:
        for name, pin in one.config.upstream.items():
            given = wheels.get(pin.wheel)
            root = upstream.fetch(pin, one.path / pin.files, cache, offline=offline, refresh=refresh, wheel=given)
            count = len(upstream.read_lock(one.path / pin.files))
            typer.echo(f"{one.op}: {name}: {count} files verified in {relative(root)}")


@app.command()
def lock(
    task: TaskName,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="PATTERN", help="Add files that no import or include names; may be repeated."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="PATTERN", help="Files to leave out; may be repeated.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only wheels in the cache.")] = False,
    wheel: WheelFiles = None,
    pin: Annotated[
        str | None, typer.Option("--pin", metavar="NAME", help="One key under [upstream]; all when left out.")
    ] = None,
) -> None:
    """List the upstream files that a task's arms import or compile, with their sha256."""
    from kda_judge.arms import upstream
    from kda_judge.contract.tasks import checkout_root, find_task
    from kda_tools.project import lock_upstream

    found = find_task(task)
    pins = found.config.upstream
    if pin is not None and pin not in pins:
        raise UsageError(f"--pin {pin}: expected {' or '.join(pins)}")
    wheels = _wheels([found], wheel)
    for name in [pin] if pin is not None else pins:
        one = pins[name]
        source = wheels.get(one.wheel) or upstream.obtain(one, upstream.cache_folder(checkout_root()), offline=offline)
        upstream.check_wheel(source, one)
        locked = lock_upstream.lock(found, one, source, also or (), without or ())
        typer.echo(f"{relative(found.path / one.files)}: {len(locked.files)} files")
        for line in locked.missing:
            typer.echo(f"  {line}")


def _wheels(tasks: "Iterable[Task]", given: Iterable[Path] | None) -> dict[str, Path]:
    """File name -> path of the wheels given with `--wheel`."""
    pinned = {pin.wheel for task in tasks for pin in task.config.upstream.values()}
    for path in given or ():
        if path.name not in pinned or not path.is_file():
            raise UsageError(f"--wheel {path}: expected a file with a pinned name, {' or '.join(sorted(pinned))}")
    return {path.name: path for path in given or ()}


@app.command()
def new(
    source: Annotated[str, typer.Argument(help="The task to copy; with --template the new op.")],
    name: Annotated[str | None, typer.Argument(help="The new op, for example gelu or llm/l20_gelu.")] = None,
    card: Annotated[
        Path | None, typer.Option("--from-trace", metavar="CARD", help="A draft card of `kda model trace --cards`.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="NAME", help="Instead of a copy: {triton,cuda}-{silu,rmsnorm,adaln,rope}."),
    ] = None,
) -> None:
    """Start a new task: as a copy of another one, or of a template."""
    from kda_judge.contract.tasks import checkout_root, find_task
    from kda_tools.knowledge.watchlist import pulls_of_task
    from kda_tools.project.from_template import from_template
    from kda_tools.project.new_task import new_task

    if template is not None:
        if name is not None or card is not None:
            raise UsageError("kda new --template: expected the new op alone, without a task to copy and without a card")
        typer.echo(
            f"{relative(from_template(template, source))}: read prompt.md, then put your op in its example's place"
        )
        return
    if name is None:
        raise UsageError("kda new: expected the task to copy and the new op's name, or --template NAME and the name")
    found, root = find_task(source), checkout_root()
    for pull in pulls_of_task(root, found.folder) if root is not None and card is not None else ():
        typer.echo(f"open upstream, look at it first: {pull.line}")
    path = new_task(found, name, card)
    typer.echo(f"{relative(path)}: read prompt.md, then config.toml, and change them first")


@app.command()
def export(
    task: TaskName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder; its name is the package's.")],
    form: Annotated[
        str, typer.Option("--form", help="plain: a package. hf: a kernel for the Hugging Face Hub.")
    ] = "plain",
    runtime: Annotated[
        bool,
        typer.Option("--runtime", help="Depend on kda-runtime and its launcher instead of torch and triton alone."),
    ] = False,
    exact: Exact = False,
    check: Annotated[bool, typer.Option(help="Compare with the solution bit by bit on a sample of rows.")] = True,
) -> None:
    """Write a solution as a folder that works without this repository."""
    from kda_judge.contract.tasks import find_task
    from kda_tools.project.export.compare import compare
    from kda_tools.project.export.write import FORMS, discard, next_steps
    from kda_tools.project.export.write import export as write

    if form not in FORMS:
        raise UsageError(f"--form: expected {' or '.join(FORMS)}, got {form!r}")
    found = find_task(task)
    package = write(found, folder, form, runtime, exact)
    if check:
        try:
            typer.echo(compare(found, package, exact))
        except BaseException:  # also for Ctrl-C: an export that was not compared must not look finished
            discard(folder)
            raise
    typer.echo(f"{relative(folder.absolute())}: README.md says how it is called")
    if form == "hf":
        typer.echo(next_steps(found, folder), nl=False)


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the GPU: copies, launches, widths; appended to docs/hardware.jsonl."),
    ] = False,
) -> None:
    """Show what this machine has, what is missing, and how to get it."""
    if measure:
        from kda_judge.evidence import record_log
        from kda_tools import checkout_folder
        from kda_tools.cli.base import command_line
        from kda_tools.lab.measure.hardware_record import LOG
        from kda_tools.lab.measure.run_measure import measure as run_measure

        root = checkout_folder.root()
        record_log.append(root / LOG, run_measure(command_line(), typer.echo))
        typer.echo(f"appended to {relative(root / LOG)}; its table: kda publish")
        return
    from kda_tools.project.doctor import checks
    from kda_tools.publish.list_views import print_checks

    print_checks(checks())


@app.command()
def publish(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; list the files that differ from what the ledgers give.")
    ] = False,
) -> None:
    """Generate results, plots and tables from the ledgers."""
    from kda_judge.contract.tasks import all_tasks, checkout_root
    from kda_tools.campaign import iterations_page, noise_page
    from kda_tools.fleet import fleet_page
    from kda_tools.knowledge import catalogue_pages
    from kda_tools.llm import known_llms
    from kda_tools.llm import page as llm_page
    from kda_tools.llm import readme_block as llm_readme
    from kda_tools.models import ceilings_page, page, readme_block
    from kda_tools.models.denoise_presets import step_names
    from kda_tools.models.known_models import find_folder
    from kda_tools.port import ports_page
    from kda_tools.project import launch_scripts
    from kda_tools.publish import hardware_page
    from kda_tools.publish.generate import publish as generate
    from kda_tools.publish.read_once import unchanged_files
    from kda_tools.publish.write_pages import write_pages

    with unchanged_files():
        models, llms = find_folder(), known_llms.find_folder()
        blocks, pictures = readme_block.contents(models) if models else ({}, {})
        blocks |= llm_readme.block(llms) if llms else {}
        changed = generate(all_tasks(), check=check, readme_blocks=blocks, step_names=step_names())
        if models is not None:
            ceilings, hotspots = ceilings_page.contents(models)
            changed += page.publish(models, check, hotspots)
            changed += write_pages(ceilings | pictures, check)
        if llms is not None:
            changed += llm_page.publish(llms, check=check)
        changed += ports_page.publish(all_tasks(), check=check)
        changed += launch_scripts.publish(all_tasks(), check=check)
        if (root := checkout_root()) is not None:
            changed += catalogue_pages.publish(root, all_tasks(), check=check)
            changed += noise_page.publish(root, check)
            changed += iterations_page.publish(root, all_tasks(), check)
            changed += hardware_page.publish(root, check=check)
            changed += fleet_page.publish(root, check=check)
    _list_changes(changed, check)


def _list_changes(changed: Sequence[str | Path], check: bool) -> None:
    for line in changed:
        typer.echo(line)
    if check and changed:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


@app.command()
def schema(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; list the schemas that are out of date.")
    ] = False,
) -> None:
    """Write the JSON Schemas of the tasks' TOML files and of the ledger's lines."""
    from kda_tools.project.json_schemas import write

    _list_changes(write(check), check)


@app.command()
def site(
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Output folder; an earlier site there is replaced.")
    ] = Path("_site"),
) -> None:
    """Build the static site from the ledgers and the documents; it works offline, from files."""
    from kda_tools.models.denoise_presets import step_names
    from kda_tools.publish.site import build

    try:  # before building, which takes a minute
        out.mkdir(parents=True, exist_ok=True)
        if not any(out.iterdir()):
            out.rmdir()
    except OSError as error:
        raise UsageError(f"--out {out}: expected a place for a folder, got: {error.strerror}") from None
    typer.echo(f"{build(out, step_names())} pages: {relative(out.absolute() / 'index.html')}")


@ledger_app.command("merge")
def merge_ledger(
    task: TaskName,
    other: Annotated[
        Path, typer.Argument(metavar="FILE", help="A ledger from another machine, or what --json wrote there.")
    ],
) -> None:
    """Append the runs in FILE that the task's ledger does not have; all of them, or none."""
    from kda_judge.contract.tasks import find_task
    from kda_judge.evidence import ledger
    from kda_tools.publish.task_claims import ledger_refusal

    found = find_task(task)
    new = ledger.merge(found.ledger, other, partial(ledger_refusal, found))
    typer.echo(f"{new} new run{'s'[: new != 1]} in {relative(found.ledger)}")
