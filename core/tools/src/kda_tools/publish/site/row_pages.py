"""Make the page of a row: every sample of its published run, what was checked, and the row in every recorded run."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RowResult, RunRecord
from kda_tools.publish import report
from kda_tools.publish.report import median
from kda_tools.publish.row_inputs import inputs
from kda_tools.publish.site.html_tables import Cell, Line, number_cell, speedup_cell, table, template, time_cell
from kda_tools.publish.site.strips import strips

STRIPS = (Metric.DEVICE, Metric.WALL)
"""The clocks whose samples are drawn; the page's table has all clocks."""


def row_link(target: str, row: str) -> str:
    """File name of a row's page, which is in the folder of its task's page."""
    return f"row-{target}-{row}.html"


def row_pages(task: Task, records: Sequence[RunRecord], latest: Mapping[str, RunRecord]) -> dict[str, tuple[str, str]]:
    """File name -> title and HTML of the page of every row of every published run."""
    found = {}
    for target, record in latest.items():
        for row in record.rows:
            title = f"{row.id} on {target}"
            found[row_link(target, row.id)] = (title, row_html(task, records, record, row, title))
    return found


def row_html(task: Task, records: Sequence[RunRecord], record: RunRecord, row: RowResult, title: str) -> str:
    """The article of a row's page as HTML."""
    settings = record.settings
    arms = tuple(arm for arm in (*settings.against, settings.subject, *settings.beside, "limit") if arm in row.arms)
    frozen = next((one for one in task.workloads if one.id == row.id), None)
    gpu, commit = report.gpu_of(record.machine), record.provenance.commit[:10]
    stale = report.STALE if report.stale(task, record) else ""
    drawn = (strips(metric, {arm: row.arms[arm].samples.get(metric, ()) for arm in arms}) for metric in STRIPS)
    return str(
        template("row.html").render(
            title=title,
            task=task,
            row=row,
            run=f"{record.run_id}, {record.utc[:10]}, {gpu}, commit {commit}{stale}",
            inputs=inputs(frozen) if frozen else "",
            models=", ".join(frozen.models) if frozen else "",
            charts=[chart for chart in drawn if chart],
            arms=arms,
            worst={arm: words for arm in arms if (words := _worst(row, arm))},
            speedups=_speedups(record, row),
            results="results.html",
            history=_history(records, row.id),
        )
    )


def folder_of(task: Task) -> PurePosixPath:
    """The folder of a task's pages in the site."""
    return PurePosixPath(task.family) / task.folder / "docs"


def _speedups(record: RunRecord, row: RowResult) -> list[tuple[str, str]]:
    """Clock and release -> the row's speedup with its interval, or the ratio of medians."""
    found = []
    for basis in report.bases(record):
        for arm in record.settings.against:
            if words := report.ratio_words(record, row, basis, arm):
                found.append((f"{report.WORDS[basis]} over {report.arm_name(record, arm)}", words))
    return found


def _worst(row: RowResult, arm: str) -> str:
    outputs = [output for output in row.arms[arm].correctness.outputs if output.used is not None]
    if not outputs:
        return ""
    output = max(outputs, key=lambda one: one.used or 0.0)
    return (
        f"{output.output}: largest error {output.max_abs:.3g}, relative L2 {output.rel_l2:.3g}, "
        f"{output.used:.1%} of the tolerance used"
    )


def _history(records: Sequence[RunRecord], row_id: str) -> str:
    """The row in every recorded run, the newest first."""
    lines = []
    for record in sorted(records, key=report.by_age, reverse=True):
        row = next((one for one in record.rows if one.id == row_id), None)
        if row is None:
            continue
        subject, first = record.settings.subject, record.settings.against[0]
        ratios = [report.row_ratio(record, row, basis, first) for basis in (Basis.DEVICE, Basis.WALL)]
        lines.append(
            Line(
                (
                    Cell(record.utc[:16].replace("T", " ")),
                    Cell(record.machine.before.name if record.machine.before else "none"),
                    Cell(record.provenance.commit[:10]),
                    Cell(row.verdict.value),
                    *(time_cell(median(row, subject, metric)) for metric in (Metric.DEVICE, Metric.WALL)),
                    time_cell(median(row, first, Metric.DEVICE)),
                    *(speedup_cell(value, None) for value in ratios),
                    number_cell(report.ratio(row.attained), row.attained),
                )
            )
        )
    head = ("run (UTC)", "GPU", "commit", "verdict", "device us", "wall us", "first opponent device us")
    return table("The row in every run", (*head, "device speedup", "wall speedup", "attained"), lines)
