"""Makes `docs/ports.md` of a task from its measured ports: times, and which of SGLang's tests ran."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import shorten

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RowResult
from kda_tools.port.port_record import PortRecord, records
from kda_tools.port.ported_arm import NAME
from kda_tools.publish.report import arm_name, gpu_of, interval, median, microseconds, share_words, speedup, table_md
from kda_tools.publish.staleness import is_outdated
from kda_tools.publish.write_pages import write_pages

LONGEST = 300
"""Characters of a test's outcome; records of older versions hold whole messages."""
EXACT = "exact"
"""Marks a port whose ops are set to give upstream's bits."""
OUTDATED = "**The solution has changed since.**\n\n"
INTRODUCTION = "Ports of this task's solution to SGLang, each measured beside the other arms. Made by `kda publish`.\n"


def publish(tasks: Iterable[Task], check: bool) -> list[str]:
    """Write the page of every task with a measured port; returns a line per change, or per due change with `check`."""
    made = [(task, records(task)) for task in tasks]
    return write_pages({task.path / "docs" / "ports.md": page_md(task, found) for task, found in made if found}, check)


def page_md(task: Task, found: list[PortRecord]) -> str:
    """The page's text, with the last port to each layout on each kind of GPU, and the last with upstream's bits."""
    latest = {(one.layout, gpu_of(one.run.machine), EXACT * one.exact): one for one in found}
    sections = "".join(
        f"\n## {', '.join(filter(None, key))}\n\n{OUTDATED * is_outdated(task, one.run.provenance)}{section_md(one)}"
        for key, one in sorted(latest.items())
    )
    return f"# {task.op}: ports\n\n{INTRODUCTION}{sections}"


def section_md(record: PortRecord) -> str:
    """One port: what was checked, and its times beside each opponent's."""
    run = record.run
    gpu = run.machine.before.name if run.machine.before else "unknown GPU"
    paragraphs = [f"{gpu}, {run.utc[:10]}, run `{run.run_id}`. GPU time of a call in microseconds, as a CUDA graph.\n"]
    checks = record.checks
    unchecked = checks.grid_asked - checks.grid_right - len(checks.grid_failed)
    left = f", {unchecked} not checked" if unchecked else ""
    paragraphs.append(
        f"- Grid on {checks.gpu or 'a CPU'}: of {checks.grid_asked} rows {checks.grid_right} right, "
        f"{len(checks.grid_failed)} wrong{left}."
    )
    paragraphs += [f"- SGLang's `{one.file}`: {shorten(one.outcome, LONGEST)}." for one in checks.upstream_tests]
    if not checks.upstream_tests:
        paragraphs.append("- The tree ships no test of SGLang's that names these functions.")
    if run.settings.quick:
        paragraphs.append("- A first look at the times: one generation of workers, few samples.")
    paragraphs += [
        f"- Not timed: `{row.id}`: {row.verdict.value}, {shorten(row.reason, LONGEST)}."
        for row in run.rows
        if median(row, NAME, Metric.DEVICE) is None
    ]
    paragraphs += [f"- Not the release's file: `{path}`." for path in record.strangers]
    arms = list(run.settings.against)
    equal = {
        arm: [part.equal for row in run.rows if arm in row.arms for part in row.arms[arm].distance] for arm in arms
    }
    if bits := [f"{arm} {share_words(min(shares))}" for arm, shares in equal.items() if shares]:
        paragraphs.append(f"- Elements with equal bits, in the worst row: {', '.join(bits)}.")
    walls = {arm: speedup(run.headline, Basis.WALL, arm) for arm in arms}
    told = [f"{arm} / {NAME} {interval(wall)}" for arm, wall in walls.items() if wall]
    if told:
        paragraphs.append(f"- Wall time in eager code, where the host launches each call: {', '.join(told)}.")
    head = ("row", NAME, *(arm_name(run, arm) for arm in arms), *(f"{arm} / {NAME}" for arm in arms))
    rows = (
        (row.id, *(microseconds(median(row, arm, Metric.DEVICE)) for arm in (NAME, *arms)), *_ratios(row, arms))
        for row in run.rows
    )
    return "\n".join(paragraphs) + f"\n\n{table_md(head, rows)}"


def _ratios(row: RowResult, arms: list[str]) -> list[str]:
    return [interval(row.speedup.get(Basis.DEVICE, {}).get(arm)) for arm in arms]
