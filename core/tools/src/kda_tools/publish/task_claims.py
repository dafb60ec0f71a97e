"""Check a run's claims against its task: which task it is of, its rows' facts, and all that `claims` checks."""

from collections.abc import Mapping

from kda_judge.contract.tasks import Task
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_tools.publish.staleness import hashes

DECIDE_ROWS = ("config", "workloads", "reference")
"""The parts of a task that define a row's op, inputs, outputs and bytes."""


def problems(task: Task, record: RunRecord) -> list[str]:
    """The run's claims that cannot be true, one line each; empty for a run that fits the task's ledger."""
    if record.task != task.op:
        return [f"it is a run of {record.task}, expected one of {task.op}"]
    return [*mismatches(record), *_rows(task, record)]


def ledger_refusal(task: Task, record: RunRecord) -> str | None:
    """Why a run cannot enter the task's ledger; None for one that can, whatever its verdicts."""
    if record.task == task.op and record.machine.kind != "cuda":
        return "it was made without a GPU and measured nothing"
    if wrong := problems(task, record):
        return f"{wrong[0]}{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}"
    return None


def knows(task: Task, source: Provenance) -> bool:
    """Whether the parts of the task that define its rows are unchanged since `source` was recorded."""
    now = hashes(task)
    return all(source.hashes.get(part) == now[part] for part in DECIDE_ROWS)


def contradicted(task: Task, source: Provenance, name: str, claimed: Mapping[str, object]) -> list[str]:
    """The claims about row `name` that differ from the task's facts, one line each; a claim of None is ignored.

    A row whose facts change gets a new id, so an id's facts are checked for runs of every age, whatever hashes `source`
    claims. An id that the task lacks cannot be checked, unless the hashes are those of the task as it is now.
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
    """The facts of row `name` by the task's files; empty if the task has no such row."""
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
    """The same facts as the record claims them; None for a fact that it does not state."""
    outputs = {error.output for arm in row.arms.values() for error in arm.correctness.outputs}
    return {
        "op": row.op,
        "production": row.production,
        "input_shapes": row.input_shapes,
        "outputs": sorted(outputs) or None,
        "limit.bytes_moved": row.limit.bytes_moved if row.limit else None,
    }
