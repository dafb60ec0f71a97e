"""Times the solution on a GPU against another release's functions, and shows which of its published wins remain."""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.bench import run
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Interval, RowResult, RunRecord
from kda_judge.session import Request, open_session
from kda_tools.port.upstream_check import Checked, write_arm
from kda_tools.publish.report import interval, published_runs, table_md

ARM = "upstream_other"
"""Name of the release's arm in a run's record."""


class Fate(str, Enum):
    """What a new run shows about a published win."""

    HOLDS = "holds"
    SHRANK = "shrank"
    """The whole interval lies below the published one."""
    DIED = "died"
    """The solution is no longer faster for sure."""
    UNKNOWN = "not comparable"
    """A run has no speedup of the row, or the published one is no win."""


def fate(then: Interval | None, now: Interval | None) -> Fate:
    """The fate of the published speedup over upstream, `then`, given the new one, `now`."""
    if then is None or now is None or then.low <= 1:
        return Fate.UNKNOWN
    if now.low <= 1:
        return Fate.DIED
    return Fate.SHRANK if now.high < then.low else Fate.HOLDS


def measure(checked: Checked, version: str, wheel: Path, quick: bool) -> RunRecord:
    """Verify and time the solution against the release's functions."""
    with TemporaryDirectory(prefix="kda-upstream-") as temporary, zipfile.ZipFile(wheel) as archive:
        folder = write_arm(checked, version, archive, Path(temporary) / f"upstream_{checked.task.op}")
        request = Request(task=checked.task, against=[ARM], ports={ARM: folder}, device="cuda", quick=quick)
        return run(open_session(request))


def wins(checked: Checked, now: RunRecord) -> str:
    """Markdown: every row's published speedup over the pinned release, and its speedup over the other release.

    The column `right` says whether the outputs of the release's own function agreed with the oracle in the same run.
    """
    arm = next(name for name, one in checked.task.config.arms.items() if _stands_on(checked, one.upstream))
    before = _published(checked.task, now)
    lines = []
    for row in now.rows:
        then = before.get(row.id, {}).get(arm)
        here = row.speedup.get(Basis.DEVICE, {}).get(ARM)
        lines.append((checked.task.op, row.id, interval(then), interval(here), fate(then, here).value, _right(row)))
    return table_md(("task", "row", "published", "now", "win", "right"), lines)


def _right(row: RowResult) -> str:
    """What the judge found about the release's own function; the row's verdict is about the solution."""
    if (arm := row.arms.get(ARM)) is None:
        return f"not run: {row.verdict.value}"
    why = arm.correctness.failure or "no reason"
    return "yes" if arm.correctness.passed else f"**no**: {why.replace('|', '/')}"


def _stands_on(checked: Checked, upstream: str | None) -> bool:
    return upstream is not None and checked.task.config.upstream[upstream] == checked.pin


def _published(task: Task, now: RunRecord) -> dict[str, dict[str, Interval]]:
    """Row -> opponent -> the published speedup on the same kind of GPU."""
    gpu = now.machine.before.name if now.machine.before else ""
    for record in published_runs(task).values():
        if record.machine.before is not None and record.machine.before.name == gpu:
            return {row.id: row.speedup.get(Basis.DEVICE, {}) for row in record.rows}
    return {}
