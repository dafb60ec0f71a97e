"""What the README says of language models: a step of each measured one before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kda_judge.evidence import stats
from kda_tools.llm.known_llms import FOLDER
from kda_tools.llm.step_page import HEADING, is_unclean, outdated, read
from kda_tools.llm.step_protocol import LlmStepRecord, PhaseStep
from kda_tools.publish.report import NONE, STALE, STALE_MEANS, gpu_of, interval, line

NAME = "llm-steps"
"""Name of the generated block."""
NOTHING = "No step of a language model is recorded on a GPU yet; `kda llm step MODEL --record` adds one.\n"


def block(folder: Path) -> dict[str, str]:
    """The block, from the records of the language models in `folder`."""
    return {NAME: steps_md(read(folder), folder)}


def steps_md(records: Sequence[LlmStepRecord], folder: Path) -> str:
    """A line for each model and kind of GPU, a column for each phase: the latest run that nothing disturbed.

    A stale run is left out if its model has one that is not; if it has none, only the last one stays.
    """
    fit = [one for one in records if one.machine.before and not is_unclean(one, folder)]
    models = list(dict.fromkeys(record.model for record in fit))
    latest = {(models.index(record.model), gpu_of(record.machine)): record for record in fit}
    current = {key: one for key, one in latest.items() if not outdated(one, folder)}
    timed = {one.model for one in current.values()}
    by_age = sorted(latest.items(), key=lambda item: item[1].utc)
    last = {one.model: (key, one) for key, one in by_age if one.model not in timed}
    latest = current | dict(last.values())
    if not latest:
        return NOTHING
    names = list(dict.fromkeys(phase.name for record in latest.values() for phase in record.phases))
    lines = []
    for _, record in sorted(latest.items()):
        found = {phase.name: _cell(phase) for phase in record.phases}
        page = f"{FOLDER.as_posix()}/docs/{record.model}.md#{HEADING.lower().replace(' ', '-')}"
        whole = (
            "" if record.layers == record.layers_of_model else f", {record.layers} of {record.layers_of_model} layers"
        )
        stale = STALE * bool(outdated(record, folder))
        lines.append(
            line(
                f"[{record.model}]({page}){whole}{stale}",
                gpu_of(record.machine),
                *(found.get(name, NONE) for name in names),
            )
        )
    footnote = STALE_MEANS * any(STALE in one for one in lines)
    return (
        f"{line('model', 'GPU', *names)}{'|---' * (2 + len(names))}|\n{''.join(lines)}\n"
        "Steps of language models as CUDA graphs, in a server's structure, with random weights and PyTorch's "
        f"attention. A decode step makes a token for each of b sequences of kv tokens.{footnote}\n"
    )


def _cell(phase: PhaseStep) -> str:
    mode = phase.modes.get("graph")
    if mode is None or mode.speedup is None:
        return NONE
    before, after = (stats.summarise(samples).median / 1000 for samples in (mode.upstream, mode.subject))
    return f"{interval(mode.speedup)}<br>{before:.2f} → {after:.2f} ms"
