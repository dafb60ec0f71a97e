"""The task pages and the headline tables: Markdown with tables and pictures in HTML, from ledgers alone."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kda_judge.contract.config import Target
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Interval, Metric, RowResult, RunRecord, Verdict
from kda_tools.publish import plots, report, tables
from kda_tools.publish.report import BASELINE, LATEST, NONE, interval, median, microseconds, ratio
from kda_tools.publish.site.strips import strips
from kda_tools.publish.tables import Ledgers

TEMPLATES = Path(__file__).parent / "templates"
NUMBER = "number"
"""Mark of a cell that holds one."""
WIDE = "---\nhide-toc: true\n---\n"
"""Front matter of a page with wide tables: furo then leaves out the list of headings beside it."""
STRIPS = (Metric.DEVICE, Metric.WALL)
"""The clocks whose samples a row's detail shows; the table beside them has all."""


@dataclass(frozen=True)
class Cell:
    """One cell: what it says, what it is sorted by where that is another thing, and where it leads."""

    text: str
    key: float | str | None = None
    href: str | None = None
    note: str = ""
    """What stands behind the text, paler."""
    mark: str = ""
    """Class of its looks."""

    @property
    def order(self) -> str:
        """What the page's script sorts by: numbers as numbers, all else as text."""
        return str(self.text if self.key is None else self.key)


@dataclass(frozen=True)
class Line:
    """One line of a table, with what opens below it."""

    cells: tuple[Cell, ...]
    anchor: str = ""
    detail: "Detail | None" = None


@dataclass(frozen=True)
class Detail:
    """What opens below a row of a run."""

    row: RowResult
    strips: tuple[Any, ...]
    arms: tuple[str, ...]
    worst: dict[str, str]
    """Arm -> its worst output against the oracle."""


def headlines(ledgers: Ledgers, folder: str) -> str:
    """The table of the tasks with their geometric means; `folder` is where the page is that shows it."""
    found = [(task, report.published(task, records)) for task, records in ledgers]
    pins = tables.all_pins(record for _, latest in found for record in latest.values())
    head = ["task", "GPU", "production rows", *(f"vs {pin}: {tables.SHOWN}" for pin in pins), "attained", "measured"]
    lines = []
    for task, latest in found:
        link = f"{'' if task.family == folder else f'{task.family}/'}{task.folder}/docs/results.html"
        first = Cell(task.folder, href=link)
        for record in latest.values():
            assert record.machine.before is not None
            assert record.headline is not None
            numbers = [Cell(text) for text in tables.against_pins(record, pins)]
            gpu, rows = Cell(record.machine.before.name), _number(str(record.headline.rows), record.headline.rows)
            lines.append(Line((first, gpu, rows, *numbers, _interval(record.headline.attained), Cell(record.utc[:10]))))
        if not latest:
            count = sum(row.production for row in task.workloads)
            empty = [*[_interval(None)] * (len(pins) + 1), Cell(NONE)]
            lines.append(Line((first, Cell("not measured"), _number(str(count), count), *empty)))
    return raw(_table("Headlines of all tasks", head, lines))


def task_page(task: Task, records: Sequence[RunRecord]) -> str:
    """A task's page: per target the headline, every row with its detail, plots and provenance; then all runs."""
    latest = report.published(task, records)
    drawn = plots.plots(task, records)
    parts = [f"{WIDE}# {task.folder}\n\n{task.config.task.title}.\n"]
    parts.append(_links(task))
    for target, goal in task.config.targets.items():
        parts.append(f"## {target}\n")
        parts.append(
            _measured(task, target, goal, latest[target], drawn) if target in latest else _unmeasured(task, goal)
        )
    parts.append(_runs(task, records, latest, drawn))
    return "\n".join(parts)


def raw(html: str) -> str:
    """HTML inside a Markdown page."""
    return f"\n````````{{raw}} html\n{html.strip()}\n````````\n"


def _links(task: Task) -> str:
    """The card, and the documents that a person or a profiler wrote about the task."""
    docs = sorted(path.name for path in (task.path / "docs").glob("*.md") if path.name != "results.md")
    words = {
        "baseline_source.md": "upstream source",
        "grid.md": "regression grid",
        "profile.md": "profile digest",
        "tuning.md": "sweeps",
    }
    known = [("card", "../prompt.md"), *((words.get(name, name[:-3].replace("_", " ")), name) for name in docs)]
    profile = "" if "profile.md" in docs else f" · no profile yet (`nox -s profile-{task.op}`)"
    return " · ".join(f"[{text}]({target})" for text, target in known) + f"{profile}\n"


def _unmeasured(task: Task, goal: Target) -> str:
    return (
        f"Compiled ({goal.capability}), not measured: the ledger holds no run on this GPU that can be published. "
        f"`kda bench {task.op} --record`, from a clean checkout on such a machine, adds one.\n"
    )


def _measured(task: Task, target: str, goal: Target, record: RunRecord, drawn: dict[str, str]) -> str:
    assert record.headline is not None
    stale = report.stale(task, record)
    faster = sum(row.verdict is Verdict.FASTER for row in record.rows)
    cards = [
        (f"{report.WORDS[basis]} over {report.pin_name(record.provenance.pins.get(arm)) or arm}", value)
        for arm in (BASELINE, LATEST)
        for basis in tables.SHOWN_BASES
        if (value := report.speedup(record.headline, basis, arm))
    ]
    cards += [("of the machine's limit", record.headline.attained)] if record.headline.attained else []
    pictures = [_inlined(drawn, kind, target) for kind in (plots.SPEEDUP, plots.ATTAINED)]
    facts = "".join(f"- {name}: {fact}\n" for name, fact in tables.facts(record).items())
    return (
        raw(_template("headline.html").render(cards=cards, stale=stale))
        + f"\nGeometric means over {record.headline.rows} production rows with 95% intervals; {faster} of "
        f"{len(record.rows)} rows are FASTER than {report.arm_name(record, record.settings.against[0])}. "
        f"{report.slower(record)} Times are medians in us per call; `wall` is what a caller pays, `device` the GPU's "
        f"share. A row opens to its samples. {report.WHOSE}\n\n"
        + f"{tables.headline_md(record)}\n{tables.numerics_md(record, task.config.task.numerics)}"
        + f"{tables.bounds_md(record)}{tables.targets_md(record, goal)}\n"
        + raw(_rows(record, target))
        + raw("".join(pictures))
        + f"\n### Provenance of {target}\n\n{facts}"
    )


def _rows(record: RunRecord, target: str) -> str:
    subject, against = record.settings.subject, record.settings.against
    shown = [(basis, arm) for basis in report.bases(record) for arm in against]
    head = ["row", "verdict", *(f"{report.WORDS[basis]} vs {arm}" for basis, arm in shown), "attained"]
    head += [f"device {arm}" for arm in (subject, *against)]
    lines = []
    for row in record.rows:
        cells = [Cell(row.id), Cell(row.verdict.value, mark=row.verdict.value.lower())]
        cells += [_interval(report.speedup(row, basis, arm)) for basis, arm in shown]
        cells += [_number(ratio(row.attained), row.attained)]
        cells += [_time(median(row, arm, Metric.DEVICE)) for arm in (subject, *against)]
        cells += [_time(row.limit.device_us if row.limit else None), _time(median(row, subject, Metric.WALL))]
        cells += [_time(row.limit.host_us if row.limit else None)]
        lines.append(Line(tuple(cells), f"{target}-{row.id}", _detail(row, record)))
    return _table(f"Rows on {target}", [*head, "limit", f"wall {subject}", "host floor"], lines)


def _detail(row: RowResult, record: RunRecord) -> Detail:
    settings = record.settings
    arms = tuple(arm for arm in (*settings.against, settings.subject, *settings.beside, "limit") if arm in row.arms)
    worst = {}
    for arm in arms:
        outputs = [output for output in row.arms[arm].correctness.outputs if output.used is not None]
        if outputs:
            output = max(outputs, key=lambda one: one.used or 0.0)
            worst[arm] = (
                f"{output.output}: largest error {output.max_abs:.3g}, relative L2 {output.rel_l2:.3g}, "
                f"{output.used:.1%} of the tolerance used"
            )
    drawn = tuple(strips(metric, {arm: row.arms[arm].samples.get(metric, ()) for arm in arms}) for metric in STRIPS)
    return Detail(row=row, strips=tuple(strip for strip in drawn if strip), arms=arms, worst=worst)


def _runs(task: Task, records: Sequence[RunRecord], latest: dict[str, RunRecord], drawn: dict[str, str]) -> str:
    if not records:
        return "## Runs\n\nThe ledger is empty.\n"
    head = ["started (UTC)", "state", "GPU", "commit", "rows", f"device vs {BASELINE}", f"device vs {LATEST}"]
    head += ["attained", "run"]
    shown = report.shown_ids(latest)
    lines = []
    for record in sorted(records, key=report.by_age, reverse=True):
        headline = record.headline
        cells = [
            Cell(record.utc[:16].replace("T", " ")),
            Cell(tables.state(task, record, shown), mark="words"),
            Cell(record.machine.before.name if record.machine.before else "none"),
            Cell(record.provenance.commit[:10]),
            _number(str(len(record.rows)), len(record.rows)),
            *(_interval(report.speedup(headline, Basis.DEVICE, arm)) for arm in (BASELINE, LATEST)),
            _interval(headline.attained if headline else None),
            Cell(record.run_id),
        ]
        lines.append(Line(tuple(cells)))
    pictures = "".join(_inlined(drawn, plots.HISTORY, target) for target in latest)
    return f"## Runs\n\nEvery run in the ledger, the newest first.\n{raw(_table('Runs', head, lines) + pictures)}"


def _inlined(drawn: dict[str, str], kind: plots.Plot, target: str) -> str:
    """A plot as part of the page: without its own colours, and with ids that no other plot has."""
    own = f"{kind.name}-{target}-"
    svg = re.sub(r"<style>.*?</style>", "", drawn[plots.file_name(kind, target)], flags=re.DOTALL)
    svg = re.sub(r'(?<= id=")', own, svg)
    svg = re.sub(r'(?<=href="#)|(?<=url\(#)', own, svg)
    return f'<figure class="kda-figure">{svg}<figcaption>{kind.says}.</figcaption></figure>'


def _interval(value: Interval | None) -> Cell:
    if value is None:
        return Cell(NONE, mark=NUMBER)
    estimate, _, rest = interval(value).partition(" ")
    return Cell(estimate, key=value.estimate, note=rest, mark=NUMBER)


def _time(value: float | None) -> Cell:
    return _number(microseconds(value), value)


def _number(text: str, value: float | None) -> Cell:
    return Cell(text, key=value, mark=NUMBER)


def _table(title: str, head: Iterable[str], lines: Sequence[Line]) -> str:
    """`head` names the columns; one that holds numbers is aligned like them."""
    numbers = {place for line in lines for place, cell in enumerate(line.cells) if cell.mark == NUMBER}
    return str(_template("table.html").render(title=title, head=list(head), lines=lines, numbers=numbers))


@lru_cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"interval": interval, "us": microseconds, "ratio": ratio}
    return environment


def _template(name: str) -> Any:
    return _environment().get_template(name)
