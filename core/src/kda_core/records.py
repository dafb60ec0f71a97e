"""What a run leaves behind: the typed record of one line of a task's `docs/ledger.jsonl`.

Times are microseconds per call. Samples are kept; every summary, interval, verdict and headline
can be computed again from them (`kda_core.derive.recompute`).
"""

from enum import Enum
from typing import Final, Literal

from kda_core.gpu import GpuState
from kda_core.toml import Strict

SCHEMA_VERSION: Final = 2
"""Of the lines written now; `kda_core.migrations` reads the older ones."""
LIMIT_ARM = "limit"
"""Arm of a row whose `wall` is the host's floor and whose `device` is the GPU's: its medians are the row's limit."""
Scalar = bool | int | float | str


class Verdict(str, Enum):
    """How one row ended."""

    FASTER = "FASTER"
    """Correct, and the whole confidence interval of the speedup lies above 1."""
    NOT_FASTER = "NOT_FASTER"
    """Correct, and the interval reaches 1 or below."""
    INCORRECT = "INCORRECT"
    """An output, or an input that must not change, is not what the oracle says."""
    INVALID = "INVALID"
    """A physical or integrity check failed: the timing cannot be true."""
    ERROR = "ERROR"
    """An arm raised, crashed or answered nonsense."""
    TIMEOUT = "TIMEOUT"
    """An arm did not answer in time."""
    UNVERIFIED = "UNVERIFIED"
    """Ran without a GPU: checked against the oracle, not measured."""


class Metric(str, Enum):
    """What a sample timed."""

    WALL = "wall"
    """N back-to-back calls, host clock, ending in a synchronise. The headline."""
    LATENCY = "latency"
    """One call and a synchronise, host clock."""
    EVENTS = "events"
    """N back-to-back calls between two CUDA events."""
    DEVICE = "device"
    """A CUDA graph of the calls, replayed: GPU time without the host."""


class Summary(Strict):
    """Statistics of one metric's samples, microseconds per call."""

    count: int
    median: float
    mean: float
    std: float
    min: float
    p10: float
    p90: float


class Interval(Strict):
    """A point estimate with its confidence interval; `kda_core.stats` says how it is made."""

    estimate: float
    low: float
    high: float
    level: float = 0.95


class OutputError(Strict):
    """How far one output was from the oracle, worst over seeds, input families and trials."""

    output: str
    max_abs: float
    max_rel: float
    rel_l2: float
    worst_index: tuple[int, ...]
    allowed: float
    """`atol + rtol * |ref|` at the worst index."""
    used: float | None = None
    """Largest share of its own tolerance that any element used; up to 1 passes."""


class Correctness(Strict):
    """What the judge found about one arm on one row."""

    passed: bool
    checks: int
    """Calls whose outputs were compared in full."""
    outputs: tuple[OutputError, ...] = ()
    failure: str | None = None
    """The first failed check, in words that name output, index, expected and got."""
    oracle: Literal["float64", "float32"] = "float64"


class ArmRow(Strict):
    """One arm on one row."""

    correctness: Correctness
    samples: dict[Metric, tuple[tuple[float, ...], ...]] = {}
    """Metric -> one tuple of samples per generation, in the order taken; sample i of two arms is a pair."""
    summary: dict[Metric, Summary] = {}
    calls_per_sample: int | None = None
    """N of `wall` and `events`."""
    kernels_per_call: float | None = None
    """Counted by the profiler in the timed loop."""
    clock_ratio: dict[Metric, float] = {}
    """Median of the judge's clock over the time that the worker claims, per sample of `wall` and `device`."""
    no_graph: str | None = None
    """Why there is no `device` metric: the calls could not be captured into a CUDA graph."""
    restarts: int = 0
    """Workers that had to be started again during this row."""
    replaced: int | None = None
    """Loops whose inputs were replaced while they ran, and whose last output was compared: two right ones are enough.
    None: not tried, as the op works in place, its calls are too long, or the run did not get that far."""


class Limit(Strict):
    """What the machine allows for one row, measured in the same run."""

    bytes_moved: int
    device_us: float
    """What core's streaming copy of as many bytes takes, as a CUDA graph like the arms."""
    host_us: float
    """Allocating the op's outputs plus the cheapest launch of an empty kernel."""

    @property
    def wall_us(self) -> float:
        """The larger of the two: no call can cost less."""
        return max(self.device_us, self.host_us)


class RowResult(Strict):
    """One row of a run."""

    id: str
    op: str
    production: bool
    verdict: Verdict
    """Of the subject arm against the run's main opponent."""
    reason: str
    """Why, in one line; for FASTER and NOT_FASTER the interval that decided."""
    arms: dict[str, ArmRow] = {}
    limit: Limit | None = None
    speedup: dict[str, Interval] = {}
    """Opponent arm -> wall median of the opponent / wall median of the subject."""
    attained: float | None = None
    """limit / the subject's wall median."""
    attained_device: float | None = None
    """device limit / the subject's device median."""
    input_shapes: dict[str, tuple[int, ...]] = {}
    """Input shapes as run; smaller than the frozen ones on a CPU."""


class Headline(Strict):
    """Equal-weight geometric means over the production rows."""

    rows: int
    speedup: dict[str, Interval]
    """Opponent arm -> geometric mean of the wall speedups."""
    speedup_device: dict[str, Interval]
    attained: Interval | None
    attained_device: Interval | None


class Provenance(Strict):
    """What exactly ran."""

    commit: str
    dirty: bool
    hashes: dict[str, str]
    """`solution`, `baseline`, `workloads`, `reference`, `config` and `harness` -> sha256."""
    pins: dict[str, str]
    """Arm -> upstream release and wheel sha256."""
    versions: dict[str, str]
    """python, torch, triton, cuda, driver, cutlass-dsl, tvm-ffi, numpy, kda-core."""


class Machine(Strict):
    """Where it ran."""

    kind: Literal["cuda", "cpu"]
    cpu: str
    cores: int
    pinned_core: int | None
    """Core that both workers were pinned to while timing."""
    platform: str
    before: GpuState | None = None
    after: GpuState | None = None


class Settings(Strict):
    """How it ran."""

    subject: str
    against: tuple[str, ...]
    """Opponents; the first decides the verdict."""
    generations: int
    samples: int
    target_sample_us: int
    seeds: tuple[int, ...]
    families: tuple[str, ...]
    cold: bool
    isolate: str
    rows: tuple[str, ...] = ()
    """Row patterns given; empty means every row."""


class Repeat(Strict):
    """A/A on one row: the first opponent timed in two workers at once. Wall samples, one tuple per generation."""

    first: tuple[tuple[float, ...], ...]
    second: tuple[tuple[float, ...], ...]
    ratio: Interval | None = None
    """`median(first) / median(second)`: 1 but for noise."""


class Spread(Strict):
    """Lowest, median and highest of what the readings of a run show."""

    low: float
    median: float
    high: float


class WatchedProcess(Strict):
    """A process of somebody else that held the GPU while the run was on."""

    pid: int
    readings: int
    """In how many it was seen."""
    memory_mb: int | None
    """The most it was seen to hold."""


class MachineWatch(Strict):
    """The GPU as it was read all through the run, by a process of its own.

    A reading counts as busy when NVML does not give idleness as the reason for its clocks: an idle GPU lowers them.
    """

    readings: int
    busy: int
    seconds: float
    """From the first reading to the last."""
    longest_gap_s: float
    """Between two readings: what is shorter can have gone unseen."""
    cpu_s: float
    """Processor time that watching cost."""
    sm_mhz: Spread | None
    """Of the busy readings, as the memory's clock and the power."""
    memory_mhz: Spread | None
    power_w: Spread | None
    temperature_c: Spread | None
    """Of all readings."""
    throttle_s: dict[str, float]
    """Reason for lowered clocks, as `gpu.Throttle` names it -> seconds between the readings that showed it."""
    foreign: tuple[WatchedProcess, ...]


class RunRecord(Strict):
    """One run: one line of a ledger."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    utc: str
    """Start, ISO 8601 with Z."""
    seconds: float
    command: str
    task: str
    provenance: Provenance
    machine: Machine
    settings: Settings
    rows: tuple[RowResult, ...]
    headline: Headline | None
    noise_floor: dict[str, Repeat] = {}
    """Row id -> A/A, the noise floor of the session; empty when it was not asked for."""
    noisy: tuple[str, ...] = ()
    """Why this run cannot be published; empty for a clean one."""
    partial: bool = False
    """True when the run was interrupted; unmeasured rows are absent."""
    machine_watch: MachineWatch | None = None
    """None: not watched, as on a CPU and in lines of version 1."""
    rerun_of: str | None = None
    """Id of the run that this one repeats."""
