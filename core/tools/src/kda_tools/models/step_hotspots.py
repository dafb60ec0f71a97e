"""The hotspots of an upstream step: a line of `diffusion/models/docs/hotspots.jsonl` for each profile that was kept.

Limits are not recorded. They are derived from the tasks' ledgers, so that a page shows a better limit as soon as one is
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_tools.models.step_flow import StepFacts, StepFlow
from kda_tools.models.step_record import StepRecord
from kda_tools.traces import catalogue
from kda_tools.traces.cards import card
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.hotspots import hotspots
from kda_tools.traces.kernel_classes import BOUND_BY_BYTES, KernelClass
from kda_tools.traces.trace_events import collect
from kda_tools.traces.trace_profile import profile
from kda_tools.traces.trace_read import TraceFile


class SpotRow(Strict):
    """Calls with the same inputs."""

    bytes: Count | None
    """Of a call, by `cards.BYTES_RULE`; None: unknown."""
    us_per_call: Amount
    calls: Amount
    """Of a step."""


class Spot(Strict):
    """A hotspot that is bound by bytes."""

    name: str
    module: str
    kind: KernelClass
    status: catalogue.Status
    rows: tuple[SpotRow, ...]

    @property
    def us(self) -> float:
        """Of a step."""
        return sum(row.us_per_call * row.calls for row in self.rows)

    def gain_us(self, limit: CopyLimit) -> float:
        """What a step gains where every call takes what its bytes do; calls of unknown bytes gain nothing."""
        return sum(max(row.us_per_call - limit.us(row.bytes), 0.0) * row.calls for row in self.rows if row.bytes)


class StepHotspots(StepFacts):
    """One profile of upstream's step, by the run of `kda model step` that kept it; microseconds a step."""

    gpu: str
    noisy: tuple[str, ...]
    trace_sha256: Digest
    gpu_us: Amount
    """Sum over all kernels."""
    by_class: dict[KernelClass, Amount]
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class StepCeiling:
    """What a step's GPU time becomes; microseconds."""

    gpu_us: float
    at_limit_us: float
    """Every kernel that is bound by bytes takes what its bytes do."""
    fused_us: float | None
    """In their place are the kernels of `dataflow.fused`; None: nobody looked for them."""
    without_us: float
    """None of them is left."""


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
    spots, by_class = [], dict.fromkeys(KernelClass, 0.0)
    for spot in hotspots(found):
        by_class[spot.kind] += spot.us / found.steps
        if spot.kind in BOUND_BY_BYTES:
            judged = catalogue.judge(spot, entries, found)
            rows = tuple(
                SpotRow(bytes=row.bytes, us_per_call=row.us_per_call, calls=row.calls_per_step)
                for row in card(found, spot, judged, None).row
            )
            spots.append(Spot(name=spot.name, module=spot.module, kind=spot.kind, status=judged.status, rows=rows))
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
        trace_sha256=found.sha256,
        gpu_us=found.gpu_us / found.steps,
        by_class={kind: us for kind, us in by_class.items() if us},
        spots=tuple(spots),
    )


def ceiling(found: StepHotspots, limits: Mapping[str, CopyLimit], flows: Iterable[StepFlow] = ()) -> StepCeiling | None:
    """The ceilings of one profile; None where no limit of its GPU is known."""
    limit = limits.get(found.gpu)
    if limit is None:
        return None
    gained = sum(spot.gain_us(limit) for spot in found.spots)
    rest = found.gpu_us - sum(spot.us for spot in found.spots)
    same = [one for one in flows if (one.model, one.release, one.layers) == (found.model, found.release, found.layers)]
    fused = rest + sum(map(limit.us, same[-1].kernels)) if same else None
    return StepCeiling(found.gpu_us, found.gpu_us - gained, fused, rest)
