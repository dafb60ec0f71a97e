"""Compute the ceiling of a step: the gain if every kernel that is bound by bytes runs at its device limit.

Fusions are not counted. A trace holds no outputs and no addresses, so it cannot show which kernel reads what another
one wrote; two tensors of the same shape may be different tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Amount, Count, Strict
from kda_tools.traces.cards import BYTES_RULE, card
from kda_tools.traces.catalogue import Finding, Status
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.hotspots import Hotspot
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.trace_profile import Profile


class SpotRow(Strict):
    """Calls with the same inputs."""

    bytes: Count | None
    """Bytes of a call by BYTES_RULE; None: unknown."""
    us_per_call: Amount
    calls: Amount
    """Calls per step."""


class Spot(Strict):
    """A hotspot that is bound by bytes."""

    name: str
    module: str
    kind: KernelClass
    status: Status
    rows: tuple[SpotRow, ...]

    @property
    def us(self) -> float:
        """Microseconds per step."""
        return sum(row.us_per_call * row.calls for row in self.rows)

    def limited(self, limit: CopyLimit) -> SpotCeiling:
        """The hotspot beside its limit: the gain if every call takes only the time that its bytes need."""
        known = [(row, limit.us(row.bytes)) for row in self.rows if row.bytes]
        return SpotCeiling(
            name=self.name,
            module=self.module,
            kind=self.kind,
            status=self.status,
            us=self.us,
            unknown_us=sum(row.us_per_call * row.calls for row in self.rows if not row.bytes),
            limit_us=sum(least * row.calls for row, least in known),
            gain_us=sum(max(row.us_per_call - least, 0.0) * row.calls for row, least in known),
        )


@dataclass(frozen=True)
class SpotCeiling:
    """A hotspot beside its limit; microseconds a step."""

    name: str
    module: str
    kind: KernelClass
    status: Status
    us: float
    unknown_us: float
    """The part of `us` whose bytes are unknown: no limit is known for it, and it gains nothing here."""
    limit_us: float
    """The device limit of the rest: that of a call's bytes by BYTES_RULE, times the calls."""
    gain_us: float
    """Sum of max(time - limit, 0) over groups of calls with the same inputs. A call can be faster than its limit if it
    moves fewer bytes than BYTES_RULE says."""


@dataclass(frozen=True)
class Ceiling:
    """All hotspots beside their limits, largest gain first; microseconds a step."""

    spots: tuple[SpotCeiling, ...]
    gpu_us: float
    """Sum over all kernels of a step, GEMM, attention and communication included."""
    step_us: float
    runs: tuple[str, ...]
    """Recorded runs that the limits are from."""

    @property
    def gain_us(self) -> float:
        """Microseconds per step that all hotspots gain."""
        return sum(spot.gain_us for spot in self.spots)

    @property
    def unknown_us(self) -> float:
        """Microseconds per step whose bytes are unknown."""
        return sum(spot.unknown_us for spot in self.spots)

    def data(self) -> dict[str, Any]:
        """The data for `--json`, with the rule by which bytes are counted."""
        return {**asdict(self), "gain_us": self.gain_us, "unknown_us": self.unknown_us, "bytes_rule": BYTES_RULE}


def ceiling(profile: Profile, judged: Iterable[tuple[Hotspot, Finding]], limit: CopyLimit | None) -> Ceiling:
    """The ceiling of a profile's step, unattributed kernels and those without shapes as unknown.

    Raises:
        UsageError: nothing was measured on this GPU, so no limit is known.
    """
    if limit is None:
        raise UsageError(
            f"--ceiling: {profile.file}: expected a trace of a GPU that a task's clean run is recorded on, whose "
            f"limits are then known; got {profile.gpu or 'an unnamed GPU'}"
        )
    limited = [spot.limited(limit) for spot in bound_by_bytes(profile, judged)]
    ranked = sorted(limited, key=lambda one: (-one.gain_us, -one.us, one.name, one.module))
    return Ceiling(tuple(ranked), profile.gpu_us / profile.steps, profile.step_us, limit.runs)


def bound_by_bytes(profile: Profile, judged: Iterable[tuple[Hotspot, Finding]]) -> Iterator[Spot]:
    """The hotspots that are bound by bytes."""
    for spot, found in judged:
        if spot.bound_by_bytes:
            rows = tuple(
                SpotRow(bytes=row.bytes, us_per_call=row.us_per_call, calls=row.calls_per_step)
                for row in card(profile, spot, found, None).row
            )
            yield Spot(name=spot.name, module=spot.module, kind=spot.kind, status=found.status, rows=rows)
