"""What a run in a task's ledger claims, against the task: whose run it is, its rows' facts, and all of `claims`."""

from collections.abc import Mapping

from kda_judge.contract.tasks import Task
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_tools.publish.staleness import hashes

DECIDE_ROWS = ("config", "workloads", "reference")
"""The parts that give a row's op, inputs, outputs and bytes."""


def problems(task: Task, record: RunRecord) -> list[str]:
    """What cannot be true of the run, one line each; empty for one that can stand in the task's ledger."""
    if record.task != task.op:
        return [f"it is a run of {record.task}, expected one of {task.op}"]
    return [*mismatches(record), *_rows(task, record)]


def unfit(task: Task, record: RunRecord) -> str | None:
    """Why a run cannot enter the task's ledger; None for one that can, whatever its verdicts."""
    if record.task == task.op and record.machine.kind != "cuda":
        return "it was made without a GPU and measured nothing"
    if wrong := problems(task, record):
        return f"{wrong[0]}{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}"
    return None


def knows(task: Task, source: Provenance) -> bool:
    """Whether the task still is what it was then, as far as it decides which rows there are, and their facts."""
    now = hashes(task)
    return all(source.hashes.get(part) == now[part] for part in DECIDE_ROWS)


def contradicted(task: Task, source: Provenance, name: str, claimed: Mapping[str, object]) -> list[str]:
    """What is claimed of the row of that id and is not as the task has it; None claims nothing.

    A row whose facts change gets a new id, so the facts of an id hold for runs of every age: the hashes of `source`
    are the run's own word. Of an id that the task lacks nothing is known, unless the run is of the task as it is now.
    """
    facts = facts_of(task, name)
    if not facts and not knows(task, source):
        return []
    return [
        f"row {name}: {key}: expected {facts.get(key)}, as {task.path.name} has it (a changed row needs a new id), "
        f"got {came}"
        for key, came in claimed.items()
        if came is not None and facts.get(key) != came
    ]


def _rows(task: Task, record: RunRecord) -> list[str]:
    if record.machine.kind != "cuda":
        return []
    return [line for row in record.rows for line in contradicted(task, record.provenance, row.id, _claimed(row))]


def facts_of(task: Task, name: str) -> dict[str, object]:
    """What the task says of the row of that id; nothing where it has no such row."""
    row = next((row for row in task.workloads if row.id == name), None)
    if row is None:
        return {}
    op = task.config.ops[row.op]
    return {
        "op": row.op,
        "production": row.production,
        "input_shapes": {key: spec.shape for key, spec in row.inputs.items()},
        "outputs": sorted(op.outputs),
        "limit.bytes_moved": traffic(op, row, load_reference(task)).moved,
    }


def _claimed(row: RowResult) -> dict[str, object]:
    """The same of the record; None where it says nothing."""
    outputs = {error.output for arm in row.arms.values() for error in arm.correctness.outputs}
    return {
        "op": row.op,
        "production": row.production,
        "input_shapes": row.input_shapes,
        "outputs": sorted(outputs) or None,
        "limit.bytes_moved": row.limit.bytes_moved if row.limit else None,
    }
