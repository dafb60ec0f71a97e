"""Say which share of the recorded models' step times a task has."""

from __future__ import annotations

from kda_judge.contract.tasks import Task
from kda_judge.evidence.record_log import read
from kda_tools.models.known_models import find_folder
from kda_tools.models.step_record import StepRecord, log


def share_of_steps(task: Task) -> str:
    """What of a model's step the task's rows are, as far as a record says."""
    folder = find_folder()
    records = read(log(folder), StepRecord) if folder is not None else []
    lines = []
    for record in records:
        if record.profile is None or task.folder not in record.profile.upstream.by_kind:
            continue
        share = record.profile.upstream.by_kind[task.folder] / record.profile.upstream.total_us
        lines.append(
            f"- {record.model} ({record.release}, run {record.run_id}): {share:.1%} of the GPU's time of a step with "
            f"upstream's ops; twice as fast here makes the step {1 / (1 - share / 2):.3f} times as fast"
        )
    users = sorted({model for row in task.workloads for model in row.models})
    origin = f"Rows come from {', '.join(users) or 'no named model'}."
    return "\n".join(
        [origin, *lines] if lines else [origin, "No measured step of a model is recorded that has this task in it."]
    )
