"""Make a task's page: for each GPU summary, rows, pictures and provenance; then all runs, and two side by side."""

import json
from collections.abc import Sequence

from kda_judge.contract.config import Target
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RunRecord
from kda_tools.publish import plots, report, results_page, tables
from kda_tools.publish.report import BASELINE, LATEST, median
from kda_tools.publish.rows_data import CSV_NAME, JSON_NAME
from kda_tools.publish.run_facts import facts, state
from kda_tools.publish.site.html_tables import (
    CLOCKS,
    Cell,
    Line,
    number_cell,
    plot,
    raw,
    speedup_cell,
    table,
    template,
    time_cell,
    wide,
)
from kda_tools.publish.site.row_pages import row_link

WORDS = {
    "baseline_source.md": "upstream source",
    "dispatch.md": "which call takes which path",
    "grid.md": "regression grid",
    "iterations.md": "campaigns",
    "ports.md": "ports to SGLang",
    "profile.md": "profiles",
    "sanitize.md": "memory checks",
    "tried.md": "tried and not adopted",
    "tuning.md": "sweeps",
}
"""File name of a task's document -> the text of the link to it."""


def task_page(task: Task, records: Sequence[RunRecord]) -> str:
    """The whole page in Markdown."""
    latest = report.published(task, records)
    drawn = plots.plots(task, records)
    parts = [f"# {task.folder}\n\n{task.config.task.title}.\n", _links(task)]
    for target, goal in report.goals(task, latest).items():
        parts.append(f"## {target}\n")
        parts.append(
            _measured(task, goal, latest[target], records, drawn) if target in latest else _unmeasured(task, goal)
        )
    parts.append(_runs(task, records, latest, drawn))
    return wide("\n".join(parts), _keywords(task))


def _keywords(task: Task) -> str:
    """Search keywords of the task: a search for one should list the task first."""
    words = [*task.folder.split("_"), *task.config.ops, *(part for op in task.config.ops for part in op.split("_"))]
    words += [model for row in task.workloads for model in row.models]
    return ", ".join(dict.fromkeys(words))


def compared_runs(task: Task, records: Sequence[RunRecord]) -> str:
    """The medians of every run as JSON, from which the page's script shows two runs side by side.

    A published result that was joined from runs stands before the newest of them, whose id and time it has.
    """
    published = report.published(task, records)
    joined = [record for record in published.values() if len(record.parts) > 1]
    whole = {record.run_id for record in published.values() if len(record.parts) < 2}
    parts = {run for record in joined for run in record.parts}
    found = []
    for record in sorted([*joined, *records], key=report.by_age, reverse=True):
        if record.machine.before is None:
            continue
        arms = (record.settings.subject, *record.settings.against)
        rows = {
            row.id: {
                f"{arm} {metric.value}": round(value, 3)
                for arm in arms
                for metric in (Metric.DEVICE, Metric.WALL)
                if (value := median(row, arm, metric)) is not None
            }
            for row in record.rows
        }
        is_joined, state = any(record is one for one in joined), ""
        code = f"{record.provenance.commit[:7]}, "
        if is_joined:  # of parts that may have several commits
            code, state = "", f" (published, joined from {len(record.parts)} runs)"
        elif record.run_id in whole | parts:
            state = " (published)" if record.run_id in whole else " (part of a published result)"
        when, gpu = record.utc[:16].replace("T", " "), report.gpu_of(record.machine)
        name = f"{when}, {gpu}, {code}{len(rows)} row{'s'[: len(rows) != 1]}{state}"
        found.append(
            {
                "id": f"{record.run_id}{'-joined' * is_joined}",
                "gpu": gpu,
                "name": name,
                "published": is_joined or record.run_id in whole,
                "part": not is_joined and record.run_id in parts,
                "rows": rows,
            }
        )
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _links(task: Task) -> str:
    """Links to the card and to the documents in the task's `docs/`."""
    docs = sorted(path.name for path in (task.path / "docs").glob("*.md") if path.name != "results.md")
    known = [("card", "../prompt.md"), *((WORDS.get(name, name[:-3].replace("_", " ")), name) for name in docs)]
    profile = "" if "profile.md" in docs else f" · no profile yet (`nox -s profile-{task.op}`)"
    return " · ".join(f"[{text}]({target})" for text, target in known) + f"{profile}\n"


def _unmeasured(task: Task, goal: Target) -> str:
    return (
        f"{results_page.UNMEASURED.format(capability=goal.capability)} "
        f"`kda bench {task.op} --record`, from a clean checkout on such a machine, adds one.\n"
    )


def _measured(task: Task, goal: Target, record: RunRecord, records: Sequence[RunRecord], drawn: dict[str, str]) -> str:
    target = report.target_of(task, record)
    assert record.headline is not None
    assert target is not None
    cards = [
        (f"{report.WORDS[basis]} over {report.pin_name(record.provenance.pins.get(arm)) or arm}", value)
        for arm in (BASELINE, LATEST)
        for basis in tables.SHOWN_BASES
        if (value := report.speedup(record.headline, basis, arm))
    ]
    cards += [("of the machine's limit", record.headline.attained)] if record.headline.attained else []
    pictures = plot(drawn, plots.SPEEDUP, target) + plot(drawn, plots.ATTAINED, target)
    summary = results_page.summary_lines(task, record, goal, records)
    lines = "".join(f"- **{name}**: {words}\n" for name, words in summary)
    return (
        raw(template("headline.html").render(cards=cards, stale=report.stale(task, record)))
        + f"\nGeometric means over {record.headline.rows} production rows with 95% intervals. {report.WHOSE}\n\n"
        + f"{lines}\n{tables.bounds_md(record)}\n"
        + f"### Rows on {target}\n\nMedians in microseconds a call; a ratio above 1 means that the solution is faster. "
        f"{CLOCKS} A row's name leads to its samples and its history. To download: [{CSV_NAME}]({CSV_NAME}), "
        f"[{JSON_NAME}]({JSON_NAME}).\n"
        + raw(_rows(record, target))
        + raw(pictures)
        + f"\n### Provenance of {target}\n\n"
        + "".join(f"- {name}: {fact}\n" for name, fact in facts(record).items())
    )


def _rows(record: RunRecord, target: str) -> str:
    """The table of rows, with the columns that fit a screen; the rows' own pages and the data files have all."""
    subject, against = record.settings.subject, record.settings.against
    shown = [(basis, arm) for basis in tables.SHOWN_BASES if basis in report.bases(record) for arm in against]
    releases = {arm: report.pin_name(record.provenance.pins.get(arm)) or arm for arm in against}
    head = ["row", "verdict", *(f"{basis.value} speedup over {releases[arm]}" for basis, arm in shown)]
    head += ["device us", "limit us", "attained"]
    lines = []
    for row in record.rows:
        limit = row.limit
        cells = [Cell(row.id, href=row_link(target, row.id)), Cell(row.verdict.value, mark=row.verdict.value.lower())]
        cells += [
            speedup_cell(report.row_ratio(record, row, basis, arm), report.speedup(row, basis, arm))
            for basis, arm in shown
        ]
        cells += [time_cell(median(row, subject, Metric.DEVICE)), time_cell(limit.device_us if limit else None)]
        cells.append(number_cell(report.ratio(row.attained), row.attained))
        lines.append(Line(tuple(cells), f"{target}-{row.id}"))
    return table(f"Rows on {target}", head, lines)


def _runs(task: Task, records: Sequence[RunRecord], latest: dict[str, RunRecord], drawn: dict[str, str]) -> str:
    if not records:
        return "## Runs\n\nThe ledger is empty.\n"
    head = ["started (UTC)", "state", "GPU", "commit", "rows", f"device vs {BASELINE}", f"device vs {LATEST}"]
    shown = report.shown_ids(latest)
    lines = []
    for record in sorted(records, key=report.by_age, reverse=True):
        headline = record.headline
        means = [report.speedup(headline, Basis.DEVICE, arm) for arm in (BASELINE, LATEST)]
        means.append(headline.attained if headline else None)
        cells = [
            Cell(record.utc[:16].replace("T", " "), hint=record.run_id),
            Cell(state(task, record, shown), mark="words"),
            Cell(record.machine.before.name if record.machine.before else "none"),
            Cell(record.provenance.commit[:10]),
            number_cell(str(len(record.rows)), len(record.rows)),
            *(speedup_cell(mean.estimate if mean else None, mean) for mean in means),
        ]
        lines.append(Line(tuple(cells)))
    pictures = "".join(plot(drawn, plots.HISTORY, target) for target in latest)
    side_by_side = template("compare.html").render(runs=compared_runs(task, records))
    every = raw(table("Runs", [*head, "attained"], lines) + pictures)
    return (
        f"## Runs\n\nEvery run in the ledger, the newest first.\n{every}"
        f"\n### Two runs side by side\n\nMedians of any two runs, of other code or on other GPUs. "
        f"A published result that was joined from runs is one choice.\n{raw(side_by_side)}"
    )
