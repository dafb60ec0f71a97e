"""What the README says under "Is my model faster?": a step of each measured model before and after."""

from collections.abc import Sequence
from pathlib import Path

from kda_judge.evidence import record_log
from kda_tools.models import step_hotspots
from kda_tools.models.fastest_modes import Fastest
from kda_tools.models.known_models import FOLDER, layers_of
from kda_tools.models.page import fastest_of, page_of, stale, unfit
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
SHOWN = 4
"""Lines before the fold, so that the README's first screen holds its three questions."""
OLD_MEANS = " *Stale*: measured before the code, the shapes or a pin changed, or before a task was added."
"""Explains the mark `STALE` to a reader."""
NOISY = "too noisy"
NOISY_MEANS = f" *Too noisy*: upstream's step differs by more than {MOST_NOISE:.0%} from itself."
"""Explains the words to a reader."""
NOTHING = (
    "No step of a model is recorded on a GPU yet, so milliseconds are missing here; "
    "`kda model step MODEL --record` adds them. The pictures below are of single kernels.\n"
)


def block(folder: Path) -> dict[str, str]:
    """The block, from the ledger of the models in `folder`."""
    return {NAME: steps_md(record_log.read(log(folder), StepRecord), folder)}


def steps_md(records: Sequence[StepRecord], folder: Path) -> str:
    """A line for each model and kind of GPU: the latest run that nothing disturbed, of the latest release.

    A stale run without a call of ours is left out: it says nothing of what is here now.
    """
    fit = [r for r in records if not unfit(r, folder) and not r.tiny and r.arm == "solution" and _ran(r)]
    by_release = sorted(fit, key=lambda one: numbers(one.release))
    latest = {(record.model, gpu_of(record.machine)): record for record in by_release}
    if not latest:
        return NOTHING
    runs = [*latest.values()]
    best = fastest_of(runs, records, folder)
    old = {id(record) for record in runs if stale(record, folder) or _lacks(record, runs)}
    newest = max((record.release for record in runs), key=numbers)
    runs = [record for record in runs if _replaced(record) or id(record) not in old]
    runs.sort(
        key=lambda one: (not _replaced(one), id(one) in old, one.release != newest, _noisy(best[id(one)]), one.model)
    )
    lines = [
        line(
            f"[{record.model}]({DOCS}/{page_of(record.model)})"
            + (record.release != newest) * f" ({record.release})"
            + STALE * (id(record) in old),
            gpu_of(record.machine),
            layers_of(record.layers, record.layers_of_model),
            *_fastest(best[id(record)] if _replaced(record) else None),
        )
        for record in runs
    ]
    head = line("model", "GPU", "layers", "ms", "speedup")
    footnote = OLD_MEANS * any(STALE in one for one in lines) + NOISY_MEANS * any(NOISY in one for one in lines)
    more = f" and [what faster kernels could give it]({CEILINGS})" * step_hotspots.log(folder).is_file()
    head += "|---" * 5 + "|\n"
    shown, rest = "".join(lines[:SHOWN]), "".join(lines[SHOWN:])
    folded = f"<details><summary>More models and GPUs</summary>\n\n{head}{rest}\n</details>\n" if rest else ""
    return (
        f"{head}{shown}\n"
        f"Steps of SGLang {newest}'s own models, with upstream's kernels and with ours, each in its fastest mode "
        "(eager, CUDA graph or torch.compile). They have as many layers as named; a VAE's step is a decode. See also "
        f"[every step]({PAGE}){more}."
        f"{footnote}\n{folded}"
    )


def _lacks(record: StepRecord, others: Sequence[StepRecord]) -> bool:
    """Whether a later run of the same step calls ops of more tasks, as after a new task came."""
    of = (record.model, record.release)
    same = [one for one in others if (one.model, one.release) == of and one.utc > record.utc]
    later = {call.task for one in same for call in one.calls}
    return not later <= {call.task for call in record.calls}


def _replaced(record: StepRecord) -> int:
    return sum(call.count for call in record.calls)


def _ran(record: StepRecord) -> bool:
    return "eager" in record.modes and record.modes["eager"].refused is None


def _noisy(best: Fastest | None) -> bool:
    return best is not None and best.noisy


def _fastest(best: Fastest | None) -> tuple[str, str]:
    """Milliseconds and speedup."""
    if best is None or best.noisy:
        word = NONE if best is None else NOISY
        return word, word
    return best.ms, interval(best.speedup)
