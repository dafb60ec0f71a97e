"""Make the pages across tasks: the table of headlines, every row with filters, and a page for each serving model."""

import re
from collections.abc import Mapping
from itertools import pairwise

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RowResult, RunRecord
from kda_tools.publish import plots, report, tables
from kda_tools.publish.report import BASELINE, LATEST, NONE, STALE, median
from kda_tools.publish.rows_data import dtype_of
from kda_tools.publish.site.html_tables import (
    CLOCKS,
    NUMBER,
    Cell,
    Line,
    inlined,
    number_cell,
    raw,
    speedup_cell,
    table,
    time_cell,
    wide,
)
from kda_tools.publish.site.row_pages import row_link
from kda_tools.publish.tables import Runs, StepNames

ROW_HEAD = (
    *("row", "task", "GPU", "verdict", "device speedup over the first release", "device speedup over the latest"),
    *("portable speedup over the latest", "wall speedup over the first release", "device us", "limit us", "attained"),
)
RELEASES = (BASELINE, LATEST)
STEP_LINE = re.compile(r"\| \[([^\]]+)\]\(")
NO_STEP = "No step of this model is timed.\n"
TASKS = "Every task"
"""Heading of the start page's last part."""
TASKS_LINK = "How much faster single kernels are: [every task](#every-task), and [every row, with filters](rows.md).\n"
"""Stands on the start page where the README has its picture: the picture is so tall that it hid the next questions."""


def with_links(start: str) -> str:
    """The start page with links to its headings before the first one: a wide page has no list of them beside it."""
    text = f"{start}\n## {TASKS}\n"
    names = re.findall(r"^## (.+)$", text, re.MULTILINE)
    links = " · ".join(f"[{name}](#{re.sub(r'[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})" for name in names)
    return text.replace("\n## ", f"\n{links}\n\n## ", 1)


def landing(runs: Runs) -> str:
    """What the start page says of every task: the README's picture inside the page, and the table of tasks."""
    every = [(task, run) for task, latest in runs for run in latest.values()]
    picture = raw(inlined(plots.overview_svg(every), "overview", plots.OVERVIEW_SAYS)) if every else ""
    return f"{picture}\n{report.MARKS} [Every row, with filters](rows.md).\n\n{headlines(runs, '')}"


def headlines(runs: Runs, folder: str) -> str:
    """The table of the tasks with their geometric means; `folder` is the folder of the page that shows it."""
    every = [record for _, latest in runs for record in latest.values()]
    pins = tables.shown_pins(every)
    there = [b for b in tables.SHOWN_BASES if any(r.headline and r.headline.speedup.get(b) for r in every)]
    # Beside own baselines the first clock stands alone, for want of room.
    columns = [(pin, basis) for pin in pins for basis in (there if pin else there[:1])]
    head = ["task", "GPU", "rows", *(f"{basis.value} speedup over {pin or tables.OWN}" for pin, basis in columns)]
    lines = []
    for task, latest in runs:
        link = f"{'' if task.family == folder else f'{task.family}/'}{task.folder}/docs/results.html"
        first = Cell(task.folder, href=link)
        for target, record in latest.items():
            assert record.headline is not None
            arms = tables.arm_of_pin(record)
            means = [report.speedup(record.headline, basis, arms.get(pin, "")) for pin, basis in columns]
            means.append(record.headline.attained)
            since = STALE if report.stale(task, record) else ""
            cells = [first, Cell(target + since), number_cell(str(record.headline.rows), record.headline.rows)]
            cells += [speedup_cell(mean.estimate if mean else None, mean) for mean in means]
            lines.append(Line((*cells, Cell(record.utc[:10], mark=NUMBER))))
        if not latest:
            count = sum(row.production for row in task.workloads)
            empty = [speedup_cell(None, None)] * (len(columns) + 1)
            lines.append(Line((first, Cell("no published run"), number_cell(str(count), count), *empty, Cell(NONE))))
    return raw(table("Headlines of all tasks", [*head, "attained", "measured"], lines))


def rows_page(runs: Runs) -> str:
    """Every row of every published run, with filters by model, dtype, GPU, verdict and task."""
    lines = [
        _row_line(task, target, record, row, f"{task.family}/{task.folder}/docs/")
        for task, latest in runs
        for target, record in latest.items()
        for row in record.rows
    ]
    return wide(
        f"# Every row\n\nAll rows of the published runs. Times are medians in microseconds a call; a ratio above "
        f"1 means that the solution is faster. The pointer shows a ratio's 95% interval, a row's name leads to its "
        f"samples. {CLOCKS}{report.STALE_MEANS}\n{raw(table('Every row', ROW_HEAD, lines))}"
    )


def step_tables(readme: str, names: StepNames) -> dict[str, str]:
    """Name of a model -> the README's lines about its step with their head, with links from a page in `models/`."""
    found: dict[str, str] = {}
    heads: dict[str, str] = {}
    head = ""
    for before, one in pairwise(readme.splitlines()):
        if one.startswith("|---"):
            head = f"{before}\n{one}\n"
        elif named := STEP_LINE.match(one):
            heads[named[1]] = head
            found[named[1]] = found.get(named[1], "") + one.replace("](", "](../") + "\n"
    tables = {name: head + found[name] for name, head in heads.items()}
    for model, parts in names.items():
        if there := [part for part in parts if part in found]:
            tables[model] = heads[there[0]] + "".join(found[part] for part in there)
    return tables


def model_pages(runs: Runs, steps: str, known: Mapping[str, str], timed: Mapping[str, str]) -> dict[str, str]:
    """Name of a serving model -> its page: its step before and after, and the rows that its traffic gives, by task.

    `known` has, for some models, a sentence about the model's step; for all others it is `steps`. `timed` has the
    table of the model's step.
    """
    found: dict[str, list[Line]] = {}
    tasks: dict[str, list[str]] = {}
    for task, latest in runs:
        models = {row.id: row.models for row in task.workloads if row.production}
        for model in dict.fromkeys(name for names in models.values() for name in names):
            tasks.setdefault(model, []).append(f"[{task.folder}](../{task.family}/{task.folder}/docs/results.md)")
            folder = f"../{task.family}/{task.folder}/docs/"
            found.setdefault(model, []).extend(
                _row_line(task, target, record, row, folder, {"task": task.folder, "gpu": target})
                for target, record in latest.items()
                for row in record.rows
                if model in models.get(row.id, ())
            )
    pages = {}
    for model in sorted(found):
        rows = "No row is measured yet.\n"
        if found[model]:
            rows = "Medians in microseconds a call; a ratio above 1 means that the solution is faster. "
            rows += f"{CLOCKS}{report.STALE_MEANS}\n"
            rows += raw(table(f"Rows of {model}", ROW_HEAD, found[model]))
        pages[model] = wide(
            f"# {model}\n\nKernels of this model that have a task: {', '.join(tasks[model])}.\n\n"
            f"{timed.get(model, NO_STEP)}\n{known.get(model, steps)}\n\n## Rows of its traffic\n\n{rows}"
        )
    return pages


def link_models(text: str, runs: Runs) -> str:
    """A family's map with links from its table of models to their pages."""
    names = {name for task, _ in runs for row in task.workloads if row.production for name in row.models}
    return re.sub(
        r"^\| ([^ |]+) \|",
        lambda line: f"| [{line[1]}](../models/{line[1]}.md) |" if line[1] in names else line[0],
        text,
        flags=re.MULTILINE,
    )


def _row_line(
    task: Task, target: str, record: RunRecord, row: RowResult, folder: str, filters: Mapping[str, str] | None = None
) -> Line:
    frozen = next((one for one in task.workloads if one.id == row.id), None)
    shown = [(Basis.DEVICE, arm) for arm in RELEASES] + [(Basis.PORTABLE, LATEST), (Basis.WALL, BASELINE)]
    cells = [
        Cell(row.id, href=f"{folder}{row_link(target, row.id)}"),
        Cell(task.folder, href=f"{folder}results.html"),
        Cell(target + (STALE if report.stale(task, record) else "")),
        Cell(row.verdict.value, mark=row.verdict.value.lower()),
        *(speedup_cell(report.row_ratio(record, row, b, arm), report.speedup(row, b, arm)) for b, arm in shown),
        time_cell(median(row, record.settings.subject, Metric.DEVICE)),
        time_cell(row.limit.device_us if row.limit else None),
        number_cell(report.ratio(row.attained), row.attained),
    ]
    if filters is None:
        filters = {
            "model": " ".join(frozen.models) if frozen else "",
            "dtype": dtype_of(frozen),
            "gpu": target,
            "verdict": row.verdict.value,
            "task": task.folder,
        }
    return Line(tuple(cells), f"{task.folder}-{target}-{row.id}", filters)
