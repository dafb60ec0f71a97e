"""Say which share of the recorded models' step times a task has."""

from __future__ import annotations

from kda_judge.contract.tasks import Task
from kda_judge.evidence.record_log import read
from kda_tools.models.known_models import find_folder
from kda_tools.models.page import stale
from kda_tools.models.step_record import StepRecord, log
from kda_tools.publish.report import STALE, gpu_of, interval


def share_of_steps(task: Task, release: str | None = None) -> str:
    """What of a model's step the task's rows are: by the newest undisturbed run of each model, release and GPU.

    `release`: only of this one, and no run that is stale.
    """
    folder = find_folder()
    records = read(log(folder), StepRecord) if folder is not None else []
    known = (one for one in records if not one.noisy and one.profile and task.folder in one.profile.upstream.by_kind)
    newest = {(one.model, one.release, gpu_of(one.machine)): one for one in known}
    old = {one.run_id for one in newest.values() if stale(one, folder)} if folder is not None else set()
    lines = [
        _told(task, one, gpu, one.run_id in old)
        for (_, _, gpu), one in sorted(newest.items(), key=lambda item: item[0])
        if release is None or (one.release == release and one.run_id not in old)
    ]
    users = sorted({model for row in task.workloads for model in row.models})
    origin = f"Rows come from {', '.join(users) or 'no named model'}."
    return "\n".join(
        [origin, *lines] if lines else [origin, "No measured step of a model is recorded that has this task in it."]
    )


def _told(task: Task, record: StepRecord, gpu: str, old: bool) -> str:
    assert record.profile is not None
    share = record.profile.upstream.by_kind[task.folder] / record.profile.upstream.total_us
    clear = {name: mode.speedup for name, mode in record.modes.items() if mode.speedup and not mode.too_noisy}
    speedups = ", ".join(f"{name} {interval(speedup)}" for name, speedup in clear.items())
    measured = f"; measured with all kernels of arm `{record.arm}`: {speedups}" if speedups else ""
    run = f"{record.release}, {gpu}, run {record.run_id}{STALE * old}"
    return (
        f"- {record.model} ({run}): {share:.1%} of the GPU's time of a step with upstream's ops; "
        f"twice as fast here makes the step {1 / (1 - share / 2):.3f} times as fast{measured}"
    )
