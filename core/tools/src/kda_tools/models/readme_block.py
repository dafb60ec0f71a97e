"""What the README says under "Is my model faster?": a step of each measured model before and after."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kda_judge.evidence import record_log
from kda_tools.models import step_hotspots
from kda_tools.models.known_models import FOLDER
from kda_tools.models.page import anchor, stale, unfit
from kda_tools.models.step_record import Samples, StepRecord, log
from kda_tools.publish.report import NONE, STALE, STALE_MEANS, gpu_of, interval, line

NAME = "steps"
"""Name of the generated block."""
PAGE = f"{FOLDER.as_posix()}/docs/steps.md"
"""The page of all recorded steps, with a section for each run."""
CEILINGS = f"{FOLDER.as_posix()}/docs/ceilings.md"
"""The page of what faster kernels could give, if a profile is recorded."""
SHOWN = 4
"""Models before the fold, so that the README's first screen holds its three questions."""
NOTHING = (
    "No step of a model is recorded on a GPU yet, so milliseconds are missing here; "
    "`kda model step MODEL --record` adds them. The pictures below are of single kernels.\n"
)


def block(folder: Path) -> dict[str, str]:
    """The block, from the ledger of the models in `folder`."""
    return {NAME: steps_md(record_log.read(log(folder), StepRecord), folder)}


def steps_md(records: Sequence[StepRecord], folder: Path) -> str:
    """A line for each model: the latest run on a GPU that nothing disturbed, of the latest release."""
    fit = [r for r in records if not unfit(r, folder) and not r.tiny and r.arm == "solution" and _ran(r, "eager")]
    latest = {record.model: record for record in sorted(fit, key=lambda one: _numbers(one.release))}
    if not latest:
        return NOTHING
    lines = [
        line(
            f"[{record.model}]({PAGE}#{anchor(record)})" + STALE * bool(stale(record, folder)),
            record.release,
            gpu_of(record.machine),
            f"{record.layers} of {record.layers_of_model}",
            str(_replaced(record)),
            f"{_milliseconds(record.modes['eager'].upstream)} → {_milliseconds(record.modes['eager'].subject)}",
            *(_speedup(record, mode) for mode in ("eager", "graph")),
        )
        for record in sorted(latest.values(), key=lambda one: not _replaced(one))
    ]
    head = line("model", "sglang", "GPU", "layers", "our calls", "ms, eager", "speedup, eager", "speedup, CUDA graph")
    footnote = STALE_MEANS * any(STALE in one for one in lines)
    more = f" and [what faster kernels could give it]({CEILINGS})" * step_hotspots.log(folder).is_file()
    head += "|---" * 8 + "|\n"
    shown, rest = "".join(lines[:SHOWN]), "".join(lines[SHOWN:])
    folded = f"<details><summary>Other models</summary>\n\n{head}{rest}\n</details>\n" if rest else ""
    return (
        f"{head}{shown}\n"
        f"Steps of SGLang's own transformers, each with the layers named: [what a step is made of]({PAGE}){more}. "
        "*Our calls*: how many calls of a step go to our ops; without any, nothing can change."
        f"{footnote}\n{folded}"
    )


def _replaced(record: StepRecord) -> int:
    return sum(call.count for call in record.calls)


def _speedup(record: StepRecord, mode: str) -> str:
    return interval(record.modes[mode].speedup) if _ran(record, mode) and _replaced(record) else NONE


def _ran(record: StepRecord, mode: str) -> bool:
    return mode in record.modes and record.modes[mode].refused is None


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def _milliseconds(samples: Samples) -> str:
    """The median of samples in microseconds."""
    samples_us = [value for process in samples for value in process]
    return f"{median(samples_us) / 1000:.2f}" if samples_us else "-"
