"""Generate `diffusion/models/docs/ceilings.md`, what faster kernels could gain in a step, and each model's hotspots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kda_judge.contract.tasks import find_tasks
from kda_judge.evidence import record_log
from kda_tools import checkout_folder
from kda_tools.models import step_flow, step_record
from kda_tools.models.known_models import layers_of
from kda_tools.models.page import HEADER, is_unclean, page_of
from kda_tools.models.step_flow import StepFlow
from kda_tools.models.step_hotspots import ATTRIBUTION, StepCeiling, StepHotspots, ceiling, log
from kda_tools.models.step_record import StepRecord
from kda_tools.publish.report import NONE, STALE, table_md
from kda_tools.traces import catalogue
from kda_tools.traces.catalogue import Entry, Status
from kda_tools.traces.ceiling import Spot
from kda_tools.traces.copy_limit import CopyLimit, copy_limit

MOST_SPOTS = 10
LEAST_SHARE = 0.002
"""Share of GPU time from which hotspots without a limit are named."""
INTRODUCTION = """Each line is a profile of upstream's step on a GPU, with random weights and the layers that are named.
Each model's page ranks its hotspots.

"""
HOW_TO_READ = """
## How to read

- **Bound by bytes**: the share of GPU time in all kernels but attention, GEMM, communication and copies from and to the
  host.
- **At the limit**: how much faster the step is if each of those kernels takes only the time that its bytes need, by the
  judge's newest clean limits on that GPU. Bytes follow from a call's inputs; without known bytes a call gains nothing.
- **Fused**: the same with one kernel, at the device limit, in place of all those between two products, convolutions or
  attentions, as `kda model flow` finds. It computes a value again where that moves fewer bytes, and a product computes
  a GELU of its result. It is never below *at the limit*: kernels of products may already do some of this work.
- **Without them**: the same if none of those kernels were left.
- **Reached**: the time that our kernels saved in the same run, as a share of what *fused* would save. Attention and
  GEMM do not count: both arms launch the same. A kernel that a step launches once weighs more in a step of few layers.

*Known* is what [the catalogue](../../../docs/catalogue.md) says now of an operator in a module. A task that the trace's
kernel showed stays.

*Stale*: the trace was read by a version that could credit an operator with launches after its end. Hotspots, and what
they gain at the limit, may be wrong.

All columns are about GPU time. A step that waits for its host gains less, unless it runs as a CUDA graph.
"""


def contents(folder: Path) -> tuple[dict[Path, str], dict[str, str]]:
    """The page by its path, and model -> what its page says of its hotspots; nothing if `folder` holds no profile."""
    records = record_log.read(log(folder), StepHotspots)
    if not records:
        return {}, {}
    limits = {gpu: limit for gpu in {one.gpu for one in records} if (limit := copy_limit(gpu, find_tasks()))}
    flows = record_log.read(step_flow.log(folder), StepFlow)
    steps = record_log.read(step_record.log(folder), StepRecord)
    fit = {one.run_id: one for one in steps if not is_unclean(one, folder)}
    page = {folder / "docs" / "ceilings.md": page_md(records, limits, flows, fit)}
    return page, sections(records, limits, fit, catalogue.load(checkout_folder.root()))


def page_md(
    records: Sequence[StepHotspots],
    limits: Mapping[str, CopyLimit],
    flows: Sequence[StepFlow],
    fit_steps: Mapping[str, StepRecord] = {},
) -> str:
    """A line for each model, release and GPU: of its newest undisturbed profile.

    `fit_steps`: the undisturbed runs whose files are here, for profiles of a checkout with changes, and for what our
    kernels saved in a profile's run.
    """
    latest = _latest(records, fit_steps)
    head = (
        *("model", "sglang", "layers", "GPU", "GPU ms a step", "bound by bytes"),
        *("at the limit", "fused", "without them", "reached"),
    )
    summaries = [_summary(one, ceiling(one, limits, flows), fit_steps.get(one.run_id)) for one in latest]
    parts = [
        f"{HEADER}\n# What faster kernels could give a model's step\n\n{INTRODUCTION}",
        table_md(head, summaries),
        *(_source(gpu, limits.get(gpu)) for gpu in sorted({one.gpu for one in latest})),
        HOW_TO_READ,
    ]
    return "".join(parts)


def _latest(records: Sequence[StepHotspots], fit_steps: Mapping[str, StepRecord]) -> list[StepHotspots]:
    """The newest undisturbed profile of each model, release and GPU; older readings last."""
    fit = [one for one in records if not one.noisy and (not one.dirty or one.run_id in fit_steps)] or records
    newest = {(one.model, one.release, one.gpu): one for one in fit}
    return sorted(newest.values(), key=lambda one: (_old(one), one.model, one.release, one.gpu))


def sections(
    records: Sequence[StepHotspots],
    limits: Mapping[str, CopyLimit],
    fit_steps: Mapping[str, StepRecord] = {},
    entries: tuple[Entry, ...] = (),
) -> dict[str, str]:
    """Model -> the hotspots of the profiles that `page_md` sums up. `entries`: the catalogue."""
    found: dict[str, str] = {}
    for one in reversed(_latest(records, fit_steps)):  # the newest release first
        found[one.model] = found.get(one.model, "") + "".join(_section(one, limits.get(one.gpu), entries))
    return found


def _summary(one: StepHotspots, found: StepCeiling | None, step: StepRecord | None) -> tuple[str, ...]:
    bound = sum(spot.us for spot in one.spots) / one.gpu_us
    after = (found.at_limit_us, found.fused_us, found.without_us) if found else (None, None, None)
    ratios = (f"{one.gpu_us / us:.3f}x" if us else NONE for us in after)
    layers = layers_of(one.layers, one.layers_of_model)
    model = f"[{one.model}]({page_of(one.model)})" + STALE * _old(one)
    share = reached(found, step) if found and step else None
    gained = NONE if share is None else f"{round(share, 2) + 0:.0%}"  # + 0: no minus before a zero
    return model, one.release, layers, one.gpu, f"{one.gpu_us / 1000:.2f}", f"{bound:.1%}", *ratios, gained


def reached(found: StepCeiling, step: StepRecord) -> float | None:
    """The time that our kernels saved, over what *fused* would save; None if either is unknown, or no call is ours.

    Attention and products are the same kernels in both arms, so that their times differ only by noise.
    """
    if step.profile is None or step.arm != "solution" or not step.calls or found.fused_us is None:
        return None
    before, after = (
        sum(us for kind, us in share.by_kind.items() if kind not in ("attention", "gemm"))
        for share in (step.profile.upstream, step.profile.subject)
    )
    possible = found.gpu_us - found.fused_us
    return (before - after) / possible if possible > 0 else None


def _old(one: StepHotspots) -> bool:
    return one.attribution != ATTRIBUTION


def _source(gpu: str, limit: CopyLimit | None) -> str:
    runs = f"from the runs {', '.join(f'`{run}`' for run in limit.runs)}" if limit else "none is known"
    return f"\nLimits of the {gpu}: {runs}.\n"


def _section(one: StepHotspots, limit: CopyLimit | None, entries: tuple[Entry, ...]) -> Iterator[str]:
    yield f"\n## Hotspots, sglang {one.release}, {one.gpu}\n\n"
    yield f"{'**Stale.** ' * _old(one)}Profile of {one.utc[:10]}, run `{one.run_id}`, commit `{one.commit[:10]}`.\n\n"
    head = ("hotspot", "module", "class", "known", "us a step", "gain at its limit, us", "of GPU time")
    lines = []
    found = [(spot, spot.limited(limit) if limit else None) for spot in one.spots]
    gains = [(spot, at_limit.gain_us if at_limit else 0.0) for spot, at_limit in found]
    for spot, gain in sorted(gains, key=lambda pair: (-pair[1], -pair[0].us))[:MOST_SPOTS]:
        numbers = (f"{spot.us:.1f}", f"{gain:.1f}" if limit else NONE, f"{gain / one.gpu_us:.2%}" if limit else NONE)
        lines.append((_name(spot), spot.module or NONE, spot.kind.value, catalogue_status(spot, entries), *numbers))
    yield table_md(head, lines)
    unknown = [(spot, at_limit.unknown_us) for spot, at_limit in found if at_limit]
    named = [
        f"{_name(spot)} of {spot.module or 'no module'} ({us:.1f} us, {us / one.gpu_us:.2%})"
        for spot, us in sorted(unknown, key=lambda pair: -pair[1])
        if us >= LEAST_SHARE * one.gpu_us
    ]
    if named:
        yield f"\nThese have no limit, since the trace does not say what a call reads and writes: {', '.join(named)}.\n"


def catalogue_status(spot: Spot, entries: tuple[Entry, ...]) -> str:
    """What the catalogue says now, and which task or entry. Kernels are not recorded: a task that they showed stays."""
    status, entry = catalogue.match("", spot.name, spot.module, entries)
    if entry is None or (spot.status is Status.TASK and status is not Status.TASK):
        return spot.status.value
    words = {Status.TASK: entry.task, Status.NOT_HIT: entry.id, Status.NEW: f"runs upstream's {entry.id}"}
    return f"{status.value}: {words[status]}"


def _name(spot: Spot) -> str:
    """The operator; of a Python function, the file without its folders."""
    return f"`{spot.name.rpartition('/')[2]}`"
