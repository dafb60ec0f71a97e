"""What a run leaves behind: the typed record of one line of a task's `docs/ledger.jsonl`.

Times are microseconds per call. Samples are kept; every summary, interval, verdict and headline
can be computed again from them (`kda_judge.evidence.derive.recompute`).
"""

from enum import Enum
from typing import Annotated, Final, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence.gpu_state import GpuState

SCHEMA_VERSION: Final = 3
"""Version of the lines written now; `kda_judge.evidence.ledger_migrations` reads the older ones."""
LIMIT_ARM = "limit"
"""Arm of a row whose `wall` is the host's floor and whose `device` is the GPU's: its medians are the row's limit."""
AGAIN = "again"
"""A second worker of the first opponent: A/A, the noise floor of the session."""
PORTABLE_ARM, REPLAYED_ARM = "portable", "replayed"
"""The solution as it leaves this repository: its plain export with Triton's own launcher, and the same with the cached
launcher that upstream's latest release wraps its Triton functions in."""
Scalar = bool | int | float | str


class Verdict(str, Enum):
    """How one row ended."""

    FASTER = "FASTER"
    """Correct, and the whole confidence interval of the speedup that decides lies above 1."""
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
    CORRECT = "CORRECT"
    """Agrees with the oracle, and was not timed: on a CPU, or where only correctness was asked for."""


class Metric(str, Enum):
    """What a sample timed."""

    WALL = "wall"
    """N back-to-back calls, host clock, ending in a synchronise."""
    LATENCY = "latency"
    """One call and a synchronise, host clock."""
    EVENTS = "events"
    """N back-to-back calls between two CUDA events."""
    DEVICE = "device"
    """A CUDA graph of the calls, replayed: GPU time without the host."""
    COLD = "cold"
    """`device` with inputs that no cache holds: the calls rotate through more than twice the L2."""


class Basis(str, Enum):
    """Which times a speedup compares: an opponent's over the subject's, in one of the subject's forms."""

    DEVICE = "device"
    """GPU time: what a CUDA graph or torch.compile leaves of a call. It decides the verdict."""
    COLD = "cold"
    """GPU time with inputs that no cache holds."""
    PORTABLE = "portable"
    """Wall of the plain export, launched by Triton: what a port into an eager framework gains."""
    REPLAYED = "replayed"
    """Wall of the plain export under the cached launcher of upstream's latest release."""
    WALL = "wall"
    """Wall of the solution launched by kda-runtime: what eager code gains that installs it."""

    @property
    def metric(self) -> Metric:
        """The metric that is compared."""
        return {Basis.DEVICE: Metric.DEVICE, Basis.COLD: Metric.COLD}.get(self, Metric.WALL)

    def arm(self, subject: str) -> str:
        """The arm that stands for the subject."""
        return {Basis.PORTABLE: PORTABLE_ARM, Basis.REPLAYED: REPLAYED_ARM}.get(self, subject)


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
    """A point estimate with its confidence interval; `kda_judge.evidence.stats` says how it is made."""

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


class Distance(Strict):
    """How far one output of the subject was from another arm's on the same inputs, worst over the draws."""

    output: str
    equal: Annotated[float, Field(ge=0, le=1)]
    """Share of the elements that are equal bit by bit; the least of any draw."""
    near: Annotated[float, Field(ge=0, le=1)]
    """Share that is at most one unit in the last place apart; the least of any draw."""
    ulps: Count
    """Largest distance in units in the last place of the output's dtype; -0 and 0 are equal. Where terms cancel, one
    rounding of a term is many units of the small result."""


class Correctness(Strict):
    """What the judge found about one arm on one row."""

    passed: bool
    checks: Count
    """Calls whose outputs were compared in full."""
    outputs: tuple[OutputError, ...] = ()
    failure: str | None = None
    """The first failed check, in words that name output, index, expected and got."""
    oracle: Literal["float64", "float32"] = "float64"


class ArmRow(Strict):
    """One arm on one row."""

    correctness: Correctness
    distance: tuple[Distance, ...] = ()
    """How far the subject's outputs are from this arm's, one entry per output; none for the subject or a wrong arm."""
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
    restarts: Count = 0
    """Workers that had to be started again during this row."""
    replaced: Count | None = None
    """Loops whose inputs were replaced while they ran, and whose last output was compared: two right ones are enough.
    None: not tried, as the op works in place, its calls are too long, or the run did not get that far."""


class Limit(Strict):
    """What the machine allows for one row, measured in the same run."""

    bytes_moved: Count
    device_us: float
    """What the fastest stream of as many bytes takes, as a CUDA graph like the arms."""
    host_us: float
    """Allocating the op's outputs and launching an empty kernel through the driver, from C."""


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
    speedup: dict[Basis, dict[str, Interval]] = {}
    """Basis -> opponent arm -> its median / the subject's. Lines of versions 1 and 2 have `wall` alone."""
    attained: float | None = None
    """The device's limit / the subject's device median."""
    input_shapes: dict[str, tuple[int, ...]] = {}
    """Input shapes as run; smaller than the frozen ones on a CPU."""


class Headline(Strict):
    """Equal-weight geometric means over the production rows."""

    rows: int
    speedup: dict[Basis, dict[str, Interval]]
    """Basis -> opponent arm -> geometric mean of the speedups."""
    attained: Interval | None
    """The device's limit over the subject's device time."""


class Provenance(Strict):
    """What exactly ran."""

    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    hashes: dict[str, Digest]
    """`solution`, `baseline`, `workloads`, `reference`, `config` and `harness` -> sha256."""
    pins: dict[str, Annotated[str, Field(pattern=r"^\S+ \S+ [0-9a-f]{64}$")]]
    """Arm -> upstream release and wheel sha256."""
    versions: dict[str, str]
    """python, torch, triton, cuda, driver, cutlass-dsl, tvm-ffi, numpy, kda-core."""


class Machine(Strict):
    """Where it ran."""

    kind: Literal["cuda", "cpu"]
    cpu: str
    cores: Annotated[Count, Field(gt=0)]
    pinned_core: Count | None
    """Core that all workers were pinned to while timing; of several, the one used most."""
    platform: str
    before: GpuState | None = None
    after: GpuState | None = None


class Settings(Strict):
    """How it ran."""

    subject: str
    against: Annotated[tuple[str, ...], Field(min_length=1)]
    """Opponents; the first decides the verdict."""
    beside: tuple[str, ...] = ()
    """Further arms: the portable ones, whose wall alone is timed, and those that outputs are compared with."""
    decides: Basis = Basis.DEVICE
    """The speedup that the verdict rests on; `wall` in lines of versions 1 and 2."""
    quick: bool = False
    """One generation of few samples, for a first look; never published."""
    generations: Count
    samples: Count
    target_sample_us: Count
    seeds: tuple[int, ...]
    families: tuple[str, ...]
    cold: bool
    """Cold device times stand beside the hot ones. In lines of versions 1 and 2: all inputs were cold."""
    isolate: str
    rows: tuple[str, ...] = ()
    """Row patterns given; empty means every row."""

    @property
    def untimed(self) -> frozenset[str]:
        """The arms whose outputs alone are compared."""
        return frozenset(self.beside) - {PORTABLE_ARM, REPLAYED_ARM}

    @property
    def all_cold(self) -> bool:
        """Whether all times are of cold inputs, which `--cold` asked for before version 3."""
        return self.cold and self.decides is Basis.WALL


class Repeat(Strict):
    """A/A on one row: the first opponent timed in two workers at once. Wall samples, one tuple per generation."""

    first: tuple[tuple[float, ...], ...]
    second: tuple[tuple[float, ...], ...]
    ratio: Interval | None = None
    """`median(first) / median(second)`: 1 but for noise."""


class Neighbours(Strict):
    """What loaded neighbours on the host do to the walls of one row, and what walls do by themselves."""

    alone: Repeat
    """A/A with idle neighbours: the noise floor."""
    beside: Repeat
    """The same arm with idle neighbours, then with loaded ones."""


class SharedHost(Strict):
    """A fleet measured on several GPUs of this host at a time."""

    neighbours: Annotated[Count, Field(gt=0)]
    """Other GPUs of the host that worked for the fleet."""
    rows: dict[str, Neighbours]
    """`op row` -> the interference, measured at the beginning of the fleet; empty if it was not."""


class Spread(Strict):
    """Lowest, median and highest of what the readings of a run show."""

    low: Amount
    median: Amount
    high: Amount


class WatchedProcess(Strict):
    """A process of somebody else that held the GPU while the run was on."""

    pid: Count
    readings: Count
    """Number of readings that showed it."""
    memory_mb: Count | None
    """The most it was seen to hold."""


class MachineWatch(Strict):
    """The GPU as it was read all through the run, by a process of its own.

    A reading counts as busy when NVML does not give idleness as the reason for its clocks: an idle GPU lowers them.
    """

    readings: Count
    busy: Count
    seconds: Amount
    """From the first reading to the last."""
    longest_gap_s: Amount
    """Between two readings: what is shorter can have gone unseen."""
    cpu_s: Amount
    """Processor time that watching cost."""
    sm_mhz: Spread | None
    """Of the busy readings, like `memory_mhz` and `power_w`."""
    memory_mhz: Spread | None
    power_w: Spread | None
    temperature_c: Spread | None
    """Of all readings."""
    throttle_s: dict[str, Amount]
    """Reason for lowered clocks, as `gpu_state.Throttle` names it -> seconds between the readings that showed it."""
    foreign: tuple[WatchedProcess, ...]


class RunRecord(Strict):
    """One run: one line of a ledger."""

    schema_version: Literal[3] = SCHEMA_VERSION
    run_id: str
    utc: str
    """Start, ISO 8601 with Z."""
    seconds: Amount
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
    node: str | None = None
    """Name of the machine within a fleet."""
    attempt: Annotated[int, Field(gt=0)] | None = None
    """Which try this is, where a fleet repeats what was lost."""
    shared_host: SharedHost | None = None
    """None: nothing else of a fleet ran on the host."""
    parts: tuple[str, ...] = ()
    """Ids of the runs that were joined into this one, to be published; no line of a ledger has any."""
