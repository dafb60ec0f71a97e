"""What the judge notes while a run goes on; `verdict.py` turns it into results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kda_judge.arms.arm_process import ArmProcess, Fault
from kda_judge.arms.protocol import Traffic
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import Distance, Metric, OutputError, Settings


@dataclass
class ArmNotes:
    """One arm on one row."""

    checks: int = 0
    """Calls whose outputs were compared in full."""
    errors: dict[str, OutputError] = field(default_factory=dict)
    """Output -> worst error so far."""
    distance: dict[str, Distance] = field(default_factory=dict)
    """Output -> how far the subject's was from this arm's."""
    incorrect: str | None = None
    """The first failed comparison, in words."""
    excused: bool = False
    """Whether this arm may be wrong on this row. If it is outside the tolerance, or refuses a call, it goes on, and its
    errors do not bound the subject's."""
    outside: str | None = None
    """Of an excused arm the first output outside the tolerance, or what it raised, in words."""
    fault: Fault | None = None
    samples: dict[Metric, list[list[float]]] = field(default_factory=dict)
    """Metric -> one list per generation."""
    graphs: list[Metric] = field(default_factory=list)
    """Metrics that this generation times by replays of CUDA graphs."""
    calls: int | None = None
    """Calls per `wall` sample in the latest generation."""
    replays: int = 1
    """Replays of the `device` graph in the latest sample."""
    clock_ratios: dict[Metric, list[float]] = field(default_factory=dict)
    """Per sample: time by the judge's clock over the time that the worker claims."""
    protocol_us: dict[Metric, list[float]] = field(default_factory=dict)
    """Per sample: time by the judge's clock less the time that the worker claims, microseconds."""
    claimed_us: dict[Metric, list[float]] = field(default_factory=dict)
    """Per sample: the time that the worker claims, microseconds."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Kernels per call in `verified` (single) and `timed` (many) calls."""
    no_graph: str | None = None
    """Why the calls could not be captured into a CUDA graph."""
    restarts: int = 0
    replaced: int | None = None
    """Loops whose inputs were replaced while they ran, and whose last output was compared; None: not tried."""
    streams: tuple[int, ...] | None = None
    """Of the limits' worker: which streams won the trials when the row was first timed."""
    idle_s: float = 0.0
    """Seconds in which others were timed."""
    idle_cpu_s: float = 0.0
    """Seconds of processor time that the arm used meanwhile."""

    @property
    def usable(self) -> bool:
        """Whether going on with this arm makes sense."""
        return self.fault is None and self.incorrect is None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turn the arm's fault into a note, so that the other arms go on."""
        try:
            yield
        except Fault as fault:
            self.fault = self.fault or fault


@dataclass
class RowNotes:
    """One row."""

    row: Workload
    traffic: Traffic
    footprint: int
    """Bytes of the tensors that one call touches. They decide how strict a limit the copy rate is."""
    arms: dict[str, ArmNotes]
    oracle_dtype: str = "float64"
    complete: bool = False
    """Whether every check was made; not on all rows of an interrupted run."""

    @property
    def failed(self) -> bool:
        """Whether an arm ended early."""
        return not all(arm.usable for arm in self.arms.values())

    def usable(self, arms: Mapping[str, ArmProcess], *names: str) -> list[tuple[str, ArmProcess]]:
        """The usable ones of `arms`, or of the arms called `names`."""
        names = names or tuple(arms)
        return [(name, arm) for name, arm in arms.items() if name in names and self.arms[name].usable]

    def worth_measuring(self, settings: Settings) -> bool:
        """Whether the subject and its first opponent can still be compared."""
        return all(self.arms[name].usable for name in (settings.subject, settings.against[0]))
