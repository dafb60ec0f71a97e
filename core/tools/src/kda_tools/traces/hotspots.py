"""Hotspots: the sums of a profile, gathered by operator and module, as one task would take them on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kda_tools.traces.kernel_classes import BOUND_BY_BYTES, KernelClass, short_name
from kda_tools.traces.trace_profile import UNATTRIBUTED, Cost, Profile, Tensor

HOST_COPY = re.compile(r"Memcpy (HtoD|DtoH)\b")
"""Names that the profiler gives to copies from and to the host."""


@dataclass(frozen=True)
class Hotspot:
    """The cost of one operator in modules of one class, or of one kernel if no operator is known.

    An operator's copies from and to the host are a hotspot of their own.

    `name` is the operator, else the Python frame, else the kernel; `module` is the innermost module's class, or "".
    """

    name: str
    module: str
    kind: KernelClass
    attributed: bool
    us: float
    calls: int
    costs: tuple[Cost, ...]
    """Largest first."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Full names, largest first, each once."""
        return tuple(dict.fromkeys(cost.source.kernel for cost in self.costs))

    @property
    def bound_by_bytes(self) -> bool:
        """Whether the GPU's memory bounds it. Copies from and to the host are bound by the host's link."""
        return self.kind in BOUND_BY_BYTES and not HOST_COPY.match(self.kernels[0])


@dataclass(frozen=True)
class Row:
    """Calls of a hotspot with the same inputs; `inputs` None: not recorded."""

    inputs: tuple[Tensor, ...] | None
    us: float
    calls: int
    moved: int
    """Bytes that the driver reports for copies and fills; 0 if the calls also launch kernels."""


def hotspots(profile: Profile) -> list[Hotspot]:
    """Every hotspot, largest first. Their times add up to the profile's GPU time."""
    groups: dict[tuple[str, str, bool, bool], list[Cost]] = {}
    for cost in profile.costs:
        source = cost.source
        attributed = source.attribution not in UNATTRIBUTED
        name = source.operator or source.frame or short_name(source.kernel)
        linked = HOST_COPY.match(source.kernel) is not None
        groups.setdefault((name, source.module.rpartition("/")[2], attributed, linked), []).append(cost)
    found = []
    for (name, module, attributed, _), costs in groups.items():
        by_kind: dict[KernelClass, float] = {}
        for cost in costs:
            by_kind[cost.source.kind] = by_kind.get(cost.source.kind, 0.0) + cost.us
        kind = max(by_kind, key=lambda one: (by_kind[one], one.value))
        calls = sum(row.calls for row in _rows(costs))
        found.append(Hotspot(name, module, kind, attributed, sum(cost.us for cost in costs), calls, tuple(costs)))
    return sorted(found, key=lambda spot: (-spot.us, spot.name, spot.module))


def rows(spot: Hotspot) -> list[Row]:
    """The hotspot's calls by inputs, those that take longest first."""
    return sorted(_rows(spot.costs), key=lambda row: (-row.us, repr(row.inputs)))


def _rows(costs: tuple[Cost, ...] | list[Cost]) -> list[Row]:
    """Group the calls by inputs. If one call launches several kernels, the most frequent one counts the calls."""
    shapes: dict[tuple[Tensor, ...] | None, list[Cost]] = {}
    for cost in costs:
        shapes.setdefault(cost.source.inputs, []).append(cost)
    found = []
    for inputs, group in shapes.items():
        places: dict[tuple[str, str], dict[str, int]] = {}
        for cost in group:
            kernels = places.setdefault((cost.source.module, cost.source.frame), {})
            kernels[cost.source.kernel] = kernels.get(cost.source.kernel, 0) + cost.calls
        calls = sum(max(kernels.values()) for kernels in places.values())
        copies = all(cost.moved for cost in group)
        found.append(Row(inputs, sum(cost.us for cost in group), calls, sum(c.moved for c in group) if copies else 0))
    return found
