"""Make the generated parts of docs/tutorial.md from the published runs of its task."""

from collections.abc import Sequence
from pathlib import Path

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RunRecord
from kda_tools.publish.report import (
    BASELINE,
    LATEST,
    gpu_of,
    interval,
    median,
    microseconds,
    published,
    ratio,
    speedup,
    table_md,
    whole_runs,
)

PAGE, OP = Path("docs") / "tutorial.md", "qknorm_rope"
"""The page's path in the checkout, and the op of its task."""
ROWS = ("qwen-4096x24x128", "qwen-19x24x128")
"""A large row, and a small one."""


def blocks(task: Task, records: Sequence[RunRecord]) -> dict[str, str]:
    """Name of the block -> its Markdown."""
    return {"floors": _floors(task, records), "history": _history(task, records)}


def _releases(task: Task) -> tuple[str, str]:
    """The versions that the two upstream arms are pinned to."""
    pins = (task.config.arms[arm].upstream for arm in (BASELINE, LATEST))
    first, latest = (task.config.upstream[pin].version for pin in pins if pin is not None)
    return first, latest


def _floors(task: Task, records: Sequence[RunRecord]) -> str:
    releases = (f"{version} us" for version in _releases(task))
    head = ("row", "GPU", "bytes", "limit us", "device us", *releases, "attained", "wall us", "host floor us")
    lines = []
    for target, record in published(task, records).items():
        for row in record.rows:
            if row.id not in ROWS or row.limit is None:
                continue
            devices = (median(row, arm, Metric.DEVICE) for arm in (record.settings.subject, BASELINE, LATEST))
            lines.append(
                (
                    row.id,
                    target,
                    f"{row.limit.bytes_moved:,}",
                    microseconds(row.limit.device_us),
                    *map(microseconds, devices),
                    ratio(row.attained),
                    microseconds(median(row, record.settings.subject, Metric.WALL)),
                    microseconds(row.limit.host_us),
                )
            )
    return table_md(head, lines)


def _history(task: Task, records: Sequence[RunRecord]) -> str:
    first, latest = _releases(task)
    over = (f"device, over {first}", f"device, over {latest}", f"wall, over {first}")
    head = ("run", "GPU", "solution", *over, "attained")
    lines = []
    for record in reversed(whole_runs(task, records)):
        if record.headline is None:
            continue
        means = [
            speedup(record.headline, basis, arm)
            for basis, arm in ((Basis.DEVICE, BASELINE), (Basis.DEVICE, LATEST), (Basis.WALL, BASELINE))
        ]
        shown = map(interval, (*means, record.headline.attained))
        solution = record.provenance.hashes["solution"][:6]
        lines.append((f"`{record.run_id}`", gpu_of(record.machine), f"`{solution}`", *shown))
    return table_md(head, lines)
