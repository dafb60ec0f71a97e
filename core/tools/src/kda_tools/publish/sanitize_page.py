"""Make `docs/sanitize.md`: compute-sanitizer's latest result by row. A pure function of `docs/sanitize.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

from kda_judge.contract.tasks import Task
from kda_judge.evidence.record_log import read
from kda_tools.lab.sanitize.sanitize_record import SanitizeRecord, Tool, ToolRun, log
from kda_tools.publish.report import HEADER, table_md
from kda_tools.publish.staleness import described, is_outdated

Latest = dict[str, dict[Tool, tuple[SanitizeRecord, ToolRun]]]
"""Row id -> tool -> the tool's latest run on the row."""
INTRODUCTION = """Rows under compute-sanitizer, each called three times: once to compile and plan, once from the
plan, once from the plan with other tensors. Every tensor is an allocation of its own. memcheck looks for accesses
outside an allocation, racecheck for hazards in shared memory (not in global memory). A row that is not here was not
checked.
"""


ELSEWHERE = "Every row and report: [sanitize.jsonl](sanitize.jsonl), and this page of the site (`kda site`).\n"


def digest_md(task: Task, whole: bool = False) -> str | None:
    """The text of `docs/sanitize.md`, what each tool found; None for a task without a run.

    With `whole` it is the site's page, which also has every row and every report.

    Raises:
        LedgerError: `docs/sanitize.jsonl` holds a line that is no sanitizer run.
    """
    records = read(log(task), SanitizeRecord)
    if not records:
        return None
    latest: Latest = {}
    for record in records:
        for run in record.runs:
            for row in record.rows:
                latest.setdefault(row.id, {})[run.tool] = (record, run)
    tools = [tool for tool in Tool if any(tool in found for found in latest.values())]
    head = f"{HEADER}\n# Memory checks of {task.folder}\n"
    summary = "".join(_summary(task, tool, latest) for tool in tools)
    if not whole:
        return f"{head}\n{summary}\n{INTRODUCTION}\n{ELSEWHERE}"
    lines = []
    for row_id, found in latest.items():
        newest = max((record for record, _ in found.values()), key=lambda record: record.utc)
        row = next(row for row in newest.rows if row.id == row_id)
        lines.append((f"`{row.id}`", row.op, row.why, *(_cell(row.id, found.get(tool)) for tool in tools)))
    table = table_md(("row", "op", "why", *(tool.value for tool in tools)), lines)
    shown = {record.run_id: record for found in latest.values() for record, _ in found.values()}
    runs = [_run_md(record, is_outdated(task, record.provenance)) for record in shown.values()]
    return "\n".join([head, summary, INTRODUCTION, table, "## Runs\n", *runs])


def _summary(task: Task, tool: Tool, latest: Latest) -> str:
    """What one tool found in the latest check of every row, in a line; results of an earlier solution come last."""
    checked = {row: found[tool] for row, found in latest.items() if tool in found}
    records = {record.run_id: record for record, _ in checked.values()}
    outdated = {run_id for run_id, record in records.items() if is_outdated(task, record.provenance)}
    older = {row: found for row, found in checked.items() if found[0].run_id in outdated}
    shown = {row: found for row, found in checked.items() if row not in older} or older
    runs = {record.run_id: record for record, _ in shown.values()}.values()
    gpus = ", ".join(dict.fromkeys(record.gpu.name for record in runs))
    days = " and ".join(sorted({record.utc[:10] for record in runs}))
    since = ""
    if shown is older:
        since = "; **the solution has changed since**"
    elif older:
        since = f"; {_count(len(older), 'other row')} checked only before the solution changed: {_outcome(older)}"
    return f"- **{tool.value}: {_outcome(shown)}** in {_count(len(shown), 'row')}, {gpus}, {days}{since}\n"


def _outcome(checked: Mapping[str, tuple[SanitizeRecord, ToolRun]]) -> str:
    wrong = [f"`{row}`" for row, (_, run) in checked.items() if any(one.row == row for one in run.findings)]
    together = any(run.errors and not run.findings for _, run in checked.values())
    return f"errors on {', '.join(wrong)}" if wrong else "errors in all rows together" if together else "no error"


def findings_text(record: SanitizeRecord) -> str:
    """A run for the terminal: one line per row and tool, then the first report of each row that has one."""
    lines = [f"{record.task}: compute-sanitizer {record.version} on {record.gpu.name}"]
    for row in record.rows:
        counts = [f"{run.tool.value} {_cell_count(row.id, run)}" for run in record.runs]
        lines.append(f"  {row.id}: {', '.join(counts)} ({row.why})")
    for run in record.runs:
        if run.errors and not run.findings:
            lines += [f"{run.tool.value}: {_count(run.errors, 'error')} in all rows together, none alone", run.report]
        for finding in run.findings:
            lines += [f"{run.tool.value} on {finding.row}:", finding.report]
    return "\n".join(lines)


def _cell_count(row: str, run: ToolRun) -> str:
    return _count(sum(finding.errors for finding in run.findings if finding.row == row), "error")


def _cell(row: str, found: tuple[SanitizeRecord, ToolRun] | None) -> str:
    if found is None:
        return "-"
    record, run = found
    together = " (errors in all rows together)" if run.errors and not run.findings else ""
    return f"{_cell_count(row, run)}, {record.utc[:10]}{together}"


def _run_md(record: SanitizeRecord, outdated: bool) -> str:
    """One run: machine, commit, and each tool's reports: by row for rows with an error, else of all rows together."""
    where = f"{record.gpu.name}, driver {record.gpu.driver}, compute-sanitizer {record.version}"
    since = "; **the solution has changed since**" if outdated else ""
    lines = [f"- {record.utc[:10]}, {where}, {described(record.provenance, record.command)}{since}\n"]
    for run in record.runs:
        counts = f"{_count(run.errors, 'error')}, {_count(run.warnings, 'warning')}"
        lines.append(f"  - {run.tool.value}: {counts} in {_count(len(record.rows), 'row')}\n")
        reports = [(finding.row, finding.report) for finding in run.findings] or [("first report", run.report)]
        if len(run.reports) > 1 and not run.findings:
            reports = [(f"report {number}", report) for number, report in enumerate(run.reports, start=1)]
        for title, report in reports:
            if report:
                quoted = "".join(f"    {line}\n" for line in ("```", *report.splitlines(), "```"))
                lines.append(f"\n    {title}\n\n{quoted}\n")
    return "".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
