"""Make every generated file from the ledgers, or compare it with them: results, plots, upstream source, tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from kda_judge.contract.errors import LedgerError, UsageError
from kda_judge.contract.tasks import Task, checkout_root, find_tasks
from kda_judge.evidence.run_record import RunRecord
from kda_tools.publish import family_map, grid_page, profile_page, sanitize_page, tried_page, tutorial_blocks
from kda_tools.publish.plots import FOLDER, OVERVIEW, overview_svg, plots
from kda_tools.publish.read_once import unchanged_files
from kda_tools.publish.report import COMMAND, HEADER, published, recorded, shown_ids
from kda_tools.publish.results_page import results_md
from kda_tools.publish.rows_data import CSV_NAME, JSON_NAME, rows_csv, rows_json
from kda_tools.publish.tables import Ledgers, StepNames, overview_md, replace_block
from kda_tools.publish.task_claims import problems
from kda_tools.publish.task_notes import foreign_lines, foreign_records
from kda_tools.publish.write_pages import write_pages

DIGESTS = {
    "grid.md": grid_page.digest_md,
    "profile.md": profile_page.digest_md,
    "sanitize.md": sanitize_page.digest_md,
    "tried.md": tried_page.digest_md,
}
"""Page -> the function that makes it, for the site as a `whole`; only tasks with records of that kind have the page."""


def publish(
    tasks: Sequence[Task],
    check: bool,
    draw: bool = True,
    readme_blocks: Mapping[str, str] | None = None,
    step_names: StepNames | None = None,
    shared: bool = True,
) -> list[str]:
    """Write every generated file of `tasks`, the README's table and the families' maps; returns what changed.

    With `check` nothing is written, and each file that differs is returned with its first differing line. Before
    writing, the numbers of the published runs are checked against their samples; `validate` checks them for every run.
    Without `draw` the plots are neither written nor compared. `readme_blocks` are blocks of the README that the caller
    has made; a block that is not given stays as it is. `step_names` are for the families' maps. Without `shared` the
    pages of all tasks stay as they are: making them reads every ledger.

    Raises:
        LedgerError: a ledger is broken or holds lines of two tasks, or the run to publish has a claim that is false.
        MissingRequirement: plots are to be drawn, and the matplotlib release for it is not installed.
        UsageError: the README or a family's README lacks the markers of a generated block.
    """
    with unchanged_files():
        ledgers = [(task, recorded(task)) for task in tasks]
        if strays := [line for task in tasks for line in foreign_lines(task)]:
            raise LedgerError("\n".join(strays))  # no page can be made from a log with runs of two tasks
        if not check:
            for task, records in ledgers:
                _demand_true_numbers(task, records)
        wanted = dict(_contents(ledgers, draw))
        if shared and (root := checkout_root()) is not None:
            wanted |= dict(_of_all_tasks(root, draw, readme_blocks or {}, step_names or {}))
    found = write_pages(wanted, check)
    for path in _leftovers(tasks, wanted) if draw else ():
        found.append(f"{path}: no published run gives this plot; run `{COMMAND}`" if check else f"{path}: removed")
        if not check:
            path.unlink()
    return found


def _demand_true_numbers(task: Task, records: Sequence[RunRecord]) -> None:
    shown = shown_ids(published(task, records))
    for record in (record for record in records if record.run_id in shown):
        if wrong := problems(task, record):
            raise LedgerError(f"{task.ledger}: run {record.run_id}: {'; '.join(wrong[:3])} ({len(wrong)} in all)")


def _contents(ledgers: Ledgers, draw: bool) -> Iterable[tuple[Path, str]]:
    for task, records in ledgers:
        if foreign_records(task):
            continue  # a copied folder: its pages belong to the source until the source's records are deleted
        docs = task.path / "docs"
        yield docs / "results.md", results_md(task, records)
        if latest := published(task, records):
            yield docs / CSV_NAME, rows_csv(task, latest)
            yield docs / JSON_NAME, rows_json(task, latest)
        yield docs / "baseline_source.md", _baseline_source(task)
        for name, digest in DIGESTS.items():
            if (text := digest(task)) is not None:
                yield docs / name, text
        for name, svg in (plots(task, records) if draw else {}).items():
            yield docs / FOLDER / name, svg


def _of_all_tasks(
    root: Path, draw: bool, readme_blocks: Mapping[str, str], step_names: StepNames
) -> Iterable[tuple[Path, str]]:
    """Path and text of the README, the plot of all tasks, the tutorial, and the families' maps."""
    everything = [(task, recorded(task)) for task in find_tasks()]
    readme = root / "README.md"
    if not readme.is_file():
        raise UsageError(f"{readme}: file not found; it holds the overview of all tasks")
    runs = [(task, published(task, records)) for task, records in everything]
    yield readme, _filled(readme, {"results": overview_md(runs), **readme_blocks})
    every = [(task, run) for task, latest in runs for run in latest.values()]
    if every and draw:
        yield root / OVERVIEW, overview_svg(every)
    tutorial = next((one for one in everything if one[0].op == tutorial_blocks.OP), None)
    if tutorial and (page := root / tutorial_blocks.PAGE).is_file():
        yield page, _filled(page, tutorial_blocks.blocks(*tutorial))
    for name, members in groupby(runs, key=lambda pair: pair[0].family):
        if (page := root / name / "README.md").is_file():
            yield page, _filled(page, family_map.blocks(list(members), page.parent, step_names))


def _filled(path: Path, blocks: Mapping[str, str]) -> str:
    """The file's text with its generated blocks made anew; the prose around them stays."""
    text = path.read_bytes().decode("utf-8")
    for name, content in blocks.items():
        try:
            text = replace_block(text, name, content)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
    return text


def _leftovers(tasks: Iterable[Task], wanted: Mapping[Path, str]) -> list[Path]:
    """Plot files that no published run produces any more."""
    return [
        path for task in tasks for path in sorted((task.path / "docs" / FOLDER).glob("*.svg")) if path not in wanted
    ]


def _baseline_source(task: Task) -> str:
    from kda_judge.arms.upstream import baseline_source

    parts = [baseline_source(pin, task.path / pin.files).rstrip() for pin in task.config.upstream.values()]
    body = "\n\n".join(parts) or "This task stands on no upstream release."
    return f"{HEADER}\n# Where the upstream arms of {task.folder} come from\n\n{body}\n"
