"""What a task's page says of runs against further opponents: another library's op, or an earlier release's."""

from collections.abc import Iterator, Sequence

from kda_judge.contract.tasks import Task
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import Basis, RunRecord, Verdict
from kda_tools.publish.report import (
    STALE,
    SUBJECT,
    UPSTREAM,
    arm_name,
    by_age,
    interval,
    setup_problems,
    speedup,
    stale,
    target_of,
)


def other_opponents_line(task: Task, published: RunRecord, records: Sequence[RunRecord]) -> Iterator[str]:
    """One line on the latest runs against each such opponent on the GPU of a published run; none without a run."""
    others = [name for name, arm in task.config.arms.items() if arm.upstream and name not in (SUBJECT, *UPSTREAM)]
    latest = [_fit(task, published, records, arm)[-1:] for arm in others]
    if words := [_words(task, found) for runs in latest for found in runs]:
        yield "; ".join(words)


def _fit(task: Task, published: RunRecord, records: Sequence[RunRecord], arm: str) -> list[RunRecord]:
    return [
        record
        for record in sorted(records, key=by_age)
        if (record.settings.subject, record.settings.against[0]) == (SUBJECT, arm)
        and target_of(task, record) == target_of(task, published)
        and not (record.settings.quick or setup_problems(task, record))
        and all(row.verdict in MEASURED for row in record.rows)
    ]


def _words(task: Task, record: RunRecord) -> str:
    arm = record.settings.against[0]
    first, *more = [row.id for row in record.rows]
    rows = f"`{first}`" + f" and {len(more)} more" * bool(more)
    slower = sum(row.verdict is not Verdict.FASTER for row in record.rows)
    faster = f"{slower} of them not FASTER" if slower else "all FASTER"
    return (
        f"over {arm_name(record, arm)} {interval(speedup(record.headline, Basis.DEVICE, arm))} on the device, rows "
        f"{rows}, {faster}, run `{record.run_id}`{STALE * bool(stale(task, record))}"
    )
