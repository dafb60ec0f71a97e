"""What language models' steps gain where a task's ops are called, for the task's drafts and prompts."""

from __future__ import annotations

from kda_judge.contract.tasks import Task
from kda_tools.llm.known_llms import find_folder
from kda_tools.llm.step_page import is_unclean, outdated, read
from kda_tools.llm.step_protocol import LlmStepRecord
from kda_tools.publish.report import STALE, gpu_of, interval

NOTHING = "No measured step of a language model is recorded that has this task in it."


def gain_of_steps(task: Task, stale_too: bool = True) -> str:
    """A line for the newest undisturbed run of each model and GPU: its phases with the task, as CUDA graphs.

    `stale_too`: also of runs that are stale, marked as such.
    """
    folder = find_folder()
    newest: dict[tuple[str, str], str] = {}
    for one in read(folder) if folder is not None else ():
        gains = _gains(task, one)
        if folder is None or not gains or one.machine.before is None or is_unclean(one, folder):
            continue
        old = bool(outdated(one, folder))
        if stale_too or not old:
            run = f"{gpu_of(one.machine)}, run {one.run_id}, {one.layers} of {one.layers_of_model} layers{STALE * old}"
            newest[one.model, gpu_of(one.machine)] = f"- {one.model} ({run}): {', '.join(gains)}"
    told = "\n".join(newest.values())
    return f"Speedups of steps with all kernels here at once, as CUDA graphs:\n{told}" if newest else NOTHING


def _gains(task: Task, record: LlmStepRecord) -> list[str]:
    """The phases that call the task's ops, each with its speedup."""
    calling = [one for one in record.phases if any(call.task == task.folder for call in one.checked.calls)]
    modes = {one.name: one.modes.get("graph") for one in calling}
    return [f"{name} {interval(mode.speedup)}" for name, mode in modes.items() if mode and mode.speedup]
