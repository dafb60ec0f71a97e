"""What a run in a task's ledger claims, against the task: whose run it is, its rows' facts, and all of `claims`."""

from kda_judge.contract.tasks import Task
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_tools.publish.staleness import hashes

DECIDE_ROWS = ("config", "workloads", "reference")
"""The parts that give a row's op, inputs, outputs and bytes; nothing is known of a run's rows where one has changed."""


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
    """Whether the task still is what it was then, as far as it decides what the facts of a row are."""
    now = hashes(task)
    return all(source.hashes.get(part) == now[part] for part in DECIDE_ROWS)


def _rows(task: Task, record: RunRecord) -> list[str]:
    if record.machine.kind != "cuda" or not knows(task, record.provenance):
        return []
    facts = {row.id: facts_of(task, row.id) for row in record.rows}
    return [
        f"row {row.id}: {key}: expected {expected}, as {task.path.name} has it, got {came}"
        for row in record.rows
        for key, came in _claimed(row).items()
        if came is not None and (expected := facts[row.id].get(key)) != came
    ]


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
