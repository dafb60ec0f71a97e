"""Record the hotspots of an upstream step: a line of `diffusion/models/docs/hotspots.jsonl` for each kept profile.

Limits are not recorded. They are derived from the tasks' ledgers, so that a page shows a better limit as soon as one is
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Digest
from kda_tools.models.step_flow import StepFacts, StepFlow
from kda_tools.models.step_record import StepRecord
from kda_tools.traces import catalogue
from kda_tools.traces.ceiling import Spot, bound_by_bytes
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.hotspots import hotspots
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.trace_events import collect
from kda_tools.traces.trace_profile import profile
from kda_tools.traces.trace_read import TraceFile

ATTRIBUTION = 2
"""Version of how launches are attributed. Since 2, an operator is not credited with launches after its end."""


class StepHotspots(StepFacts):
    """One profile of upstream's step, with the facts of the run that kept it; times in microseconds a step."""

    gpu: str
    noisy: tuple[str, ...]
    attribution: Annotated[int, Field(ge=1, le=ATTRIBUTION)] = 1
    """`ATTRIBUTION` when the trace was read."""
    trace_sha256: Digest
    gpu_us: Amount
    """Sum over all kernels."""
    by_class: dict[KernelClass, Amount]
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class StepCeiling:
    """A step's GPU time in microseconds: as measured, and with faster kernels."""

    gpu_us: float
    at_limit_us: float
    """Time if every kernel that is bound by bytes runs at the device limit."""
    fused_us: float | None
    """Time if the kernels of `dataflow.fused_bytes` replace those that are bound by bytes; None: no flow is recorded.

    Never more than `at_limit_us`: where kernels of products do such work already, the step moves fewer bytes than that.
    """
    without_us: float
    """Time if all kernels that are bound by bytes are gone."""


def log(folder: Path) -> Path:
    """Every profile; `docs/ceilings.md` is generated from it."""
    return folder / "docs" / "hotspots.jsonl"


def read_trace(trace: Path, step: StepRecord, root: Path) -> StepHotspots:
    """The hotspots of the profile that `step` kept, judged by the catalogue of the checkout at `root`.

    Raises:
        UsageError: the file is no trace with GPU events.
    """
    found = profile(collect(TraceFile(trace)), None)
    entries = catalogue.load(root)
    all_spots, by_class = hotspots(found), dict.fromkeys(KernelClass, 0.0)
    for spot in all_spots:
        by_class[spot.kind] += spot.us / found.steps
    judged = ((spot, catalogue.judge(spot, entries, found)) for spot in all_spots)
    return StepHotspots(
        run_id=step.run_id,
        utc=step.utc,
        model=step.model,
        release=step.release,
        layers=step.layers,
        layers_of_model=step.layers_of_model,
        gpu=found.gpu,
        commit=step.commit,
        dirty=step.dirty,
        noisy=step.noisy,
        attribution=ATTRIBUTION,
        trace_sha256=found.sha256,
        gpu_us=found.gpu_us / found.steps,
        by_class={kind: us for kind, us in by_class.items() if us},
        spots=tuple(bound_by_bytes(found, judged)),
    )


def ceiling(found: StepHotspots, limits: Mapping[str, CopyLimit], flows: Iterable[StepFlow] = ()) -> StepCeiling | None:
    """The ceilings of one profile; None if no limit of its GPU is known."""
    limit = limits.get(found.gpu)
    if limit is None:
        return None
    gained = sum(spot.limited(limit).gain_us for spot in found.spots)
    rest = found.gpu_us - sum(spot.us for spot in found.spots)
    same = [one for one in flows if (one.model, one.release, one.layers) == (found.model, found.release, found.layers)]
    fused = rest + sum(map(limit.us, same[-1].kernels)) if same else None
    at_limit = found.gpu_us - gained
    return StepCeiling(found.gpu_us, at_limit, None if fused is None else min(fused, at_limit), rest)
