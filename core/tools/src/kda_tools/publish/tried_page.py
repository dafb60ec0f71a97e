"""Make `docs/tried.md`: changes of the solution that were measured and not adopted. From `docs/tried.jsonl` alone."""

from __future__ import annotations

from collections.abc import Iterator

from kda_judge.contract.tasks import Task
from kda_judge.evidence.record_log import read
from kda_judge.evidence.run_record import Basis, RowResult, RunRecord
from kda_tools.lab.tried_record import TriedRecord, log
from kda_tools.publish.report import HEADER, NONE, SUBJECT, interval, speedup, table_md

INTRODUCTION = """Each line is a change that was measured beside the solution as it was then, and not adopted. If that
changed later, [dispatch.md](dispatch.md) says so. The ratio is the solution's device time over the changed one's, a
geometric mean over the rows: below 1 the change is slower. A patch is of the solution as it was then (`git apply` in
the checkout's root). `kda bench --tried` adds a line.
"""
ELSEWHERE = "Patches: [tried.jsonl](tried.jsonl), and this page of the site (`kda site`).\n"


def digest_md(task: Task, whole: bool = False) -> str | None:
    """The text of `docs/tried.md`; None for a task without such a run. With `whole` also the patches.

    Raises:
        LedgerError: `docs/tried.jsonl` holds a line that is no such record.
    """
    records = read(log(task), TriedRecord)
    if not records:
        return None
    head = f"{HEADER}\n# What was tried on {task.folder} and not adopted\n\n{INTRODUCTION}"
    table = table_md(("change", "ratio", "rows", "GPU, day, run"), map(_line, records))
    if not whole:
        return f"{head}\n{table}\n{ELSEWHERE}"
    return "\n".join([head, table, *(_details(one) for one in records)])


def row_lines(task: Task, row: str) -> Iterator[str]:
    """What was tried on a row, a line each: the change, its ratio and its run."""
    for one in read(log(task), TriedRecord):
        for result in one.run.rows:
            if result.id == row:
                yield f"{_plain(one.change)}: {_ratio(result)} of the solution's speed (run {one.run.run_id})"


def _line(one: TriedRecord) -> tuple[str, ...]:
    run = one.run
    mean = interval(speedup(run.headline, Basis.DEVICE, SUBJECT))
    rows = ", ".join(f"`{row.id}` {_ratio(row)}" for row in run.rows) or NONE
    return _plain(one.change), mean, rows, f"{_gpu(run)}, {run.utc[:10]}, `{run.run_id}`"


def _details(one: TriedRecord) -> str:
    return f"## {one.name}\n\n{_plain(one.change)}.\n\n```diff\n{one.patch}```\n"


def _ratio(row: RowResult) -> str:
    """The row's ratio with its interval; its verdict where it was not timed."""
    found = speedup(row, Basis.DEVICE, SUBJECT)
    return interval(found) if found else row.verdict.value


def _gpu(run: RunRecord) -> str:
    return run.machine.before.name if run.machine.before else "unknown GPU"


def _plain(change: str) -> str:
    return change.strip().rstrip(".")
