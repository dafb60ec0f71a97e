"""What the README says under "Is my model faster?": a step of each measured model before and after."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kda_judge.evidence import record_log
from kda_tools.models import step_hotspots
from kda_tools.models.fastest_modes import Fastest
from kda_tools.models.known_models import FOLDER, layers_of
from kda_tools.models.page import fastest_of, is_unclean, page_of, stale
from kda_tools.models.step_plots import speedups_svg
from kda_tools.models.step_record import MOST_NOISE, StepRecord, log
from kda_tools.project.preflight import numbers
from kda_tools.publish.report import NONE, STALE, gpu_of, interval, line

NAME = "steps"
"""Name of the generated block."""
DOCS = f"{FOLDER.as_posix()}/docs"
PAGE = f"{DOCS}/steps.md"
"""The page of all recorded steps."""
CEILINGS = f"{DOCS}/ceilings.md"
"""The page of what faster kernels could give, if a profile is recorded."""
PLOT = "plots/speedups.svg"
"""The picture, beside the pages."""
SAYS = "Speedup of a step of each diffusion model, with milliseconds before and after"
OLD_MEANS = " *Stale*: measured before the code, the shapes or a pin changed, or before a task was added."
"""Explains the mark `STALE` to a reader."""
NOISY = "too noisy"
NOISY_MEANS = f" *Too noisy*: upstream's step differs by more than {MOST_NOISE:.0%} from itself."
"""Explains the words to a reader."""
NOTHING = (
    "No step of a model is recorded on a GPU yet, so milliseconds are missing here; "
    "`kda model step MODEL --record` adds them. The pictures below are of single kernels.\n"
)


class ShownStep(NamedTuple):
    """A run whose step the README shows."""

    record: StepRecord
    best: Fastest | None
    """None if the step calls no op of ours."""
    old: bool
    """Whether it is stale, or a task was added since."""


def contents(folder: Path) -> tuple[dict[str, str], dict[Path, str]]:
    """The block by its name, and its picture by its path, from the ledger of the models in `folder`."""
    steps = steps_to_show(record_log.read(log(folder), StepRecord), folder)
    return {NAME: steps_md(steps, folder)}, plot(steps, folder)


def plot(steps: Sequence[ShownStep], folder: Path) -> dict[Path, str]:
    """Path and text of the block's picture; nothing if every step is stale or too noisy."""
    steps = _drawn(steps)
    found = [(step.record.model, step.best) for step in steps if step.best]
    points = [(f"{model}, {best.before:.2f} → {best.after:.2f} ms", best.speedup) for model, best in found]
    if not points:
        return {}
    where = f"{gpu_of(steps[0].record.machine)}, SGLang {steps[0].record.release}"
    return {folder / "docs" / PLOT: speedups_svg(points, where)}


def steps_to_show(records: Sequence[StepRecord], folder: Path) -> list[ShownStep]:
    """For each model and kind of GPU the latest run that nothing disturbed, of the latest release.

    A stale run without a call of ours is left out: it says nothing of what is here now.
    """
    fit = [r for r in records if not is_unclean(r, folder) and not r.tiny and r.arm == "solution" and _ran(r)]
    by_release = sorted(fit, key=lambda one: numbers(one.release))
    runs = [*{(record.model, gpu_of(record.machine)): record for record in by_release}.values()]
    best = fastest_of(runs, records, folder)
    steps = [
        ShownStep(one, best[id(one)] if _replaced(one) else None, bool(stale(one, folder)) or _lacks(one, runs))
        for one in runs
    ]
    steps = [step for step in steps if step.best or not step.old]
    newest = max((numbers(step.record.release) for step in steps), default=())
    steps.sort(
        key=lambda step: (
            not step.best,
            step.old,
            numbers(step.record.release) != newest,
            bool(step.best and step.best.noisy),
            step.record.model,
        )
    )
    return steps


def steps_md(steps: Sequence[ShownStep], folder: Path) -> str:
    """The picture of current steps, and folded a line for each of `steps`."""
    if not steps:
        return NOTHING
    newest = max((step.record.release for step in steps), key=numbers)
    lines = [
        line(
            f"[{record.model}]({DOCS}/{page_of(record.model)})"
            + (record.release != newest) * f" ({record.release})"
            + STALE * old,
            gpu_of(record.machine),
            layers_of(record.layers, record.layers_of_model),
            *_fastest(best),
        )
        for record, best, old in steps
    ]
    head = line("model", "GPU", "layers", "ms", "speedup") + "|---" * 5 + "|\n"
    picture = f"![{SAYS}]({DOCS}/{PLOT})\n\n" if _drawn(steps) else ""
    footnote = OLD_MEANS * any(STALE in one for one in lines) + NOISY_MEANS * any(NOISY in one for one in lines)
    more = f" and [what faster kernels could give it]({CEILINGS})" * step_hotspots.log(folder).is_file()
    return (
        f"{picture}Steps of SGLang {newest}'s own models, with upstream's kernels and with ours, each in its fastest "
        "mode (eager, CUDA graph or torch.compile), in milliseconds. They have as many layers as the table names; a "
        "VAE's step is a decode. See also "
        f"[every step]({PAGE}){more}.\n\n"
        f"<details><summary>Every model and GPU, with layers</summary>\n\n{head}{''.join(lines)}\n"
        f"{footnote.strip()}\n\n</details>\n"
    )


def _drawn(steps: Sequence[ShownStep]) -> list[ShownStep]:
    """Those of the picture: current runs of one release on one kind of GPU, the one with most of them."""
    fit = [step for step in steps if step.best and not step.old and not step.best.noisy]
    kinds = Counter((gpu_of(step.record.machine), step.record.release) for step in fit)
    most = max(kinds, key=lambda kind: (kinds[kind], kind), default=None)
    return [step for step in fit if (gpu_of(step.record.machine), step.record.release) == most]


def _lacks(record: StepRecord, others: Sequence[StepRecord]) -> bool:
    """Whether a later run of the same step calls ops of more tasks, as after a new task came."""
    of = (record.model, record.release)
    same = [one for one in others if (one.model, one.release) == of and one.utc > record.utc]
    later = {call.task for one in same for call in one.calls}
    return not later <= {call.task for call in record.calls}


def _replaced(record: StepRecord) -> int:
    return sum(call.count for call in record.calls)


def _ran(record: StepRecord) -> bool:
    return any(mode.speedup is not None for mode in record.modes.values())


def _fastest(best: Fastest | None) -> tuple[str, str]:
    """Milliseconds and speedup."""
    if best is None or best.noisy:
        word = NONE if best is None else NOISY
        return word, word
    return best.ms, interval(best.speedup)
