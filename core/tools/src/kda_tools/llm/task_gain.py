"""What language models' steps gain where a task's ops are called, for the task's drafts and prompts."""

from __future__ import annotations

from kda_judge.contract.tasks import Task
from kda_tools.llm.known_llms import find_folder
from kda_tools.llm.step_page import outdated, read, unfit
from kda_tools.publish.report import STALE, gpu_of, interval

NOTHING = "No measured step of a language model is recorded that has this task in it."


def gain_of_steps(task: Task, stale_too: bool = True) -> str:
    """A line for the newest undisturbed run of each model and GPU: its phases with the task, as CUDA graphs.

    `stale_too`: also of runs that are stale, marked as such.
    """
    folder = find_folder()
    newest: dict[tuple[str, str], str] = {}
    for one in read(folder) if folder is not None else ():
        if one.machine.before is None or folder is None or unfit(one, folder):
            continue
        gains = [
            f"{phase.name} {interval(phase.modes['graph'].speedup)}"
            for phase in one.phases
            if "graph" in phase.modes and any(call.task == task.folder for call in phase.checked.calls)
        ]
        old = bool(outdated(one, folder))
        if gains and (stale_too or not old):
            run = f"{gpu_of(one.machine)}, run {one.run_id}, {one.layers} of {one.layers_of_model} layers{STALE * old}"
            newest[one.model, gpu_of(one.machine)] = f"- {one.model} ({run}): {', '.join(gains)}"
    told = "\n".join(newest.values())
    return f"Speedups of steps with all kernels here at once, as CUDA graphs:\n{told}" if newest else NOTHING
