"""What the README says under "Is my model faster?": a step of each measured model before and after."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kda_judge.evidence import record_log
from kda_tools.models.page import stale
from kda_tools.models.step_record import Mode, Samples, StepRecord, log
from kda_tools.publish.report import STALE, interval, line

NAME = "steps"
"""Of the generated block."""
NOTHING = (
    "No step of a model is recorded on a GPU yet, so milliseconds are missing here; "
    "`kda model step MODEL --record` adds them. The pictures below are of single kernels.\n"
)


def block(folder: Path) -> dict[str, str]:
    """The block, from the ledger of the models in `folder`."""
    return {NAME: steps_md(record_log.read(log(folder), StepRecord), folder)}


def steps_md(records: Sequence[StepRecord], folder: Path) -> str:
    """A line for each model, release, arm and mode: the latest run on a GPU that nothing disturbed."""
    latest = {(r.model, r.release, r.arm): r for r in records if r.modes and not r.noisy and not r.dirty and not r.tiny}
    lines = [
        line(
            record.model,
            (record.machine.before.name if record.machine.before else "-") + STALE * bool(stale(record, folder)),
            f"sglang {record.release}",
            f"{record.arm}, {name}",
            f"{record.layers} of {record.layers_of_model}",
            *_times(mode),
        )
        for record in latest.values()
        if record.arm != "upstream"
        for name, mode in record.modes.items()
        if mode.refused is None
    ]
    if not lines:
        return NOTHING
    head = line("model", "GPU", "release", "with", "layers", "before, ms a step", "after, ms a step", "speedup")
    return f"{head}{'|---' * 8}|\n{''.join(lines)}"


def _times(mode: Mode) -> tuple[str, str, str]:
    return _milliseconds(mode.upstream), _milliseconds(mode.subject), interval(mode.speedup)


def _milliseconds(samples: Samples) -> str:
    """The median of samples in microseconds."""
    samples_us = [value for process in samples for value in process]
    return f"{median(samples_us) / 1000:.2f}" if samples_us else "-"
