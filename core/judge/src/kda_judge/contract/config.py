"""The typed contract of a task: `config.toml`."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kda_judge.contract.strict_models import Amount, Strict, read_toml, validate

Device = Literal["cuda", "cpu"]
Positive = Annotated[int, Field(gt=0, le=10_000_000)]
Times = Annotated[int, Field(gt=0, le=10_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Goal = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SHA256 = r"[0-9a-f]{64}"
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+!]*$"
"""Pattern of one part of a wheel's file name; `-` separates the parts."""
WHOLE = ("baseline", "upstream_latest", "solution", "eager")
"""Arms that run by default, so each has every op."""


class Pin(Strict):
    """One upstream release: the exact wheel, and the file that lists what is taken from it."""

    package: str = Field(pattern=FILE_NAME)
    """Name as in the wheel's file name, for example quack_kernels."""
    imported: str = ""
    """Name that it is imported by, where that differs, for example quack."""
    version: str = Field(pattern=FILE_NAME)
    wheel_sha256: str = Field(pattern=f"^{SHA256}$")
    python: str = Field(pattern=r"^\d+$")
    """Python tag without `cp`, for example 312."""
    platform: str = Field(pattern=FILE_NAME)
    """Platform tag, for example manylinux_2_34_x86_64. Only text files are used, so any machine may fetch the wheel.
    `any`: one wheel for all Pythons and platforms."""
    licence: str
    files: str
    """Lock file, relative to the task folder."""

    @property
    def wheel(self) -> str:
        """The wheel's file name."""
        tags = "py3-none-any" if self.platform == "any" else f"cp{self.python}-cp{self.python}-{self.platform}"
        return f"{self.package}-{self.version}-{tags}.whl"

    @property
    def module(self) -> str:
        """The package that is imported."""
        return self.imported or self.package


class TaskTable(Strict):
    """What the task is."""

    op: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Unique across families; names the sessions. Equals the folder's name without `kNN_`."""
    title: str
    models: tuple[str, ...] = ()
    """Serving models whose traffic the production rows come from."""
    numerics: Literal["exact", "lossless", "high"] = "lossless"
    """What the solution promises beside the tolerance, in upstream's own tiers: `exact` the first upstream's bits,
    `lossless` its precision everywhere with other roundings, `high` a lower precision somewhere."""


class Rule(Strict):
    """How to judge an output for which a tolerance says too little or too much."""

    rule: Literal["units", "indices", "probabilities"]
    """`units`: no element is further from the oracle than `within` numbers of its own dtype (quantised values, their
    scales). `indices`: an index is judged by its key, the value that it points at, which the oracle's `keys` give;
    indices with equal keys are equally good. `probabilities`: within the tolerance of their dtype, not negative, and
    every row sums to one. Sampled tokens cannot be judged, only the probabilities that they are drawn from."""
    within: float = Field(ge=0, allow_inf_nan=False)
    """`units`: the number of units in the last place. `indices`: how far the keys may be apart. `probabilities`: how
    far the sum may be from one."""
    reason: str

    @property
    def alone(self) -> bool:
        """Whether the rule stands in place of a tolerance."""
        return self.rule != "probabilities"


class Op(Strict):
    """One public callable, with the upstream signature."""

    inputs: tuple[str, ...]
    """Tensor arguments in positional order; a row's scalars are passed by keyword."""
    outputs: tuple[str, ...]
    """In place: names of inputs. Otherwise one name per returned tensor, in order."""
    like: dict[str, str] = {}
    """Output name -> input whose shape and dtype it has (contiguous). Not for in-place outputs."""
    per_row: tuple[str, ...] = ()
    """Outputs that are like no input: every row says their shape and dtype, as `outputs.NAME` (contiguous)."""
    returns: Literal["outputs", "none", "argument"] = "outputs"
    """What the callable returns. In place: None, or the tensors that it wrote into, in order (`argument`)."""
    by_name: bool = False
    """Tensors are passed by keyword, as scalars are: in upstream's signature a scalar stands before one of them."""
    rules: dict[str, Rule] = {}
    """Output -> how it is judged where that is not by a tolerance alone."""
    pools: dict[str, str] = {}
    """Large in-place output (a pool) -> input of slots: the op writes the pool's rows that the slots name, and no
    others. The oracle returns only these rows, in the slots' order."""
    gpus: int = 1
    """GPUs that a call runs on."""
    takes_no_slices: str = ""
    """Why no caller passes a slice, which may begin at any element. Empty: one verified call of a row gets slices."""

    @model_validator(mode="after")
    def _outputs_are_known(self) -> "Op":
        for name in self.outputs:
            source = name if name in self.inputs or name in self.per_row else self.like.get(name)
            if source not in (*self.inputs, *self.per_row):
                raise ValueError(
                    f"output {name!r} is no input, `like` names no input for it, and it is not in `per_row`"
                )
        known = sorted(set(self.outputs) - set(self.inputs))
        for key, names in (("like", tuple(self.like)), ("per_row", self.per_row)):
            for name in names:
                if name not in known or (name in self.like and name in self.per_row):
                    raise ValueError(
                        f"{key} names {name!r}: expected new tensors among the outputs, {known}, each in `like` or in "
                        f"`per_row`"
                    )
        for name in self.rules:
            if name not in self.outputs:
                raise ValueError(f"rules names {name!r}: expected one of the outputs, {list(self.outputs)}")
        for name, slots in self.pools.items():
            if name not in self.outputs or name not in self.inputs or slots not in self.inputs:
                raise ValueError(
                    f"pools: expected an output that is written in place and an input of slots, got {name!r} and "
                    f"{slots!r}; inputs are {list(self.inputs)}, outputs {list(self.outputs)}"
                )
        if self.gpus != 1:
            raise ValueError(f"gpus = {self.gpus}: expected 1; an op that runs on a group of GPUs cannot be judged")
        return self

    @model_validator(mode="after")
    def _returned_is_known(self) -> "Op":
        if self.returns == "outputs" and any(name in self.inputs for name in self.outputs):
            raise ValueError(
                "an op that works in place must return nothing: returns = 'none', or what it wrote: 'argument'"
            )
        if self.returns == "argument" and not set(self.outputs) <= set(self.inputs):
            raise ValueError(f"returns = 'argument': expected outputs that are inputs, got {list(self.outputs)}")
        return self

    def tolerated(self, name: str) -> bool:
        """Whether output `name` is judged by the tolerance of its dtype."""
        return name not in self.rules or not self.rules[name].alone


class Arm(Strict):
    """A set of callables with the upstream signatures, imported only inside its own worker."""

    module: str = Field(pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?$")
    """Relative to the task's package: `solution`, `baseline`, `baseline.latest`."""
    upstream: str | None = None
    """Name of the `[upstream."..."]` table to activate before the import."""
    devices: tuple[Device, ...] = ("cuda",)
    compiled: bool = False
    """Wrap every callable in torch.compile."""
    ops: tuple[str, ...] = ()
    """The ops that it has, where it lacks some: a run with this arm leaves out the rows of all other ops."""


class Tolerance(Strict):
    """`|out - ref| <= atol + rtol * |ref|` for every element, with the reason for the numbers."""

    atol: Amount
    rtol: float = Field(ge=0, lt=1)
    """Less than 1: from 1 on, an output of nothing but zeros would pass."""
    reason: str


class Target(Strict):
    """What every production row of the task aims at on one kind of GPU."""

    capability: str = Field(pattern=r"^sm_\d{2,3}[af]?$")
    """Compilation target, for example sm_90a."""
    attained: Goal | None = None
    """Device limit over device time, of rows that move more than 64 MB."""
    within_us: Goal | None = None
    """How many microseconds a smaller row may be above its device limit."""
    ops_within_us: dict[str, Goal] = {}
    """The same for single ops: one whose blocks wait for all others cannot come as near to a copy."""

    times_as_fast: dict[str, Goal] = {}
    """Pattern of row names -> the device speedup over each release of upstream that such rows aim at."""

    @property
    def stated(self) -> bool:
        """Whether any goal is set; for some GPUs a task is only compiled."""
        return any((self.attained, self.within_us, self.ops_within_us, self.times_as_fast))

    def distance_us(self, op: str) -> float | None:
        """How many microseconds a smaller row of this op may be above its device limit."""
        return self.ops_within_us.get(op, self.within_us)

    def speedup(self, row: str) -> float | None:
        """The speedup over each release of upstream that a row aims at: that of the first pattern that fits."""
        return next((goal for pattern, goal in self.times_as_fast.items() if fnmatchcase(row, pattern)), None)


def _all_differ(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("expected seeds that all differ: the same one twice draws the same values")
    return seeds


class Bench(Strict):
    """Benchmark settings; a run records the ones it used."""

    generations: Times = 3
    """How often all workers are started afresh: host speed differs between processes."""
    samples: Times = 6
    """Samples per row, arm and generation. More make a recorded device interval no narrower: processes differ more."""
    target_sample_us: Positive = 10_000
    """Microseconds: back-to-back calls are added until one `wall` sample lasts this long, 1000 calls of a small row."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=3), AfterValidator(_all_differ)] = (11, 23, 47)
    isolate: Literal["none", "workload"] = "none"
    """`workload`: fresh workers for every row, for ops whose state leaks between rows."""
    timeout_s: Positive = 180
    """Seconds that a single command to a worker may take, the first call's compilation included."""


class Cpu(Strict):
    """How rows shrink on a machine without a GPU."""

    keep: dict[str, tuple[int, ...]] = {}
    """Input -> dimensions that never shrink (the last one never does, unless `shrink` names it)."""
    shrink: dict[str, tuple[int, ...]] = {}
    """Input -> dimensions that shrink even where their size equals one that is kept."""


class Config(Strict):
    """One task's `config.toml`."""

    task: TaskTable
    ops: dict[str, Op] = Field(min_length=1)
    upstream: dict[str, Pin] = {}
    arms: dict[str, Arm]
    tolerance: dict[str, Tolerance] = {}
    """Keyed by the dtype of the output. Outputs whose rule stands alone need none."""
    targets: dict[str, Target] = {}
    bench: Bench = Bench()
    cpu: Cpu = Cpu()

    @property
    def capabilities(self) -> list[str]:
        """Every compilation target once: several kinds of GPU may run the same machine code."""
        return list(dict.fromkeys(target.capability for target in self.targets.values()))

    def ops_of(self, arm: str) -> tuple[str, ...]:
        """The ops that an arm has."""
        return self.arms[arm].ops or tuple(self.ops)

    @model_validator(mode="after")
    def _names_resolve(self) -> "Config":
        for needed in ("baseline", "solution"):
            if needed not in self.arms:
                raise ValueError(f"[arms.{needed}] is required, got arms {sorted(self.arms)}")
        if not self.tolerance and any(op.tolerated(name) for op in self.ops.values() for name in op.outputs):
            raise ValueError("missing key 'tolerance': an output has no rule that stands alone")
        for name, arm in self.arms.items():
            if arm.upstream is not None and arm.upstream not in self.upstream:
                raise ValueError(
                    f"[arms.{name}] upstream = {arm.upstream!r}: no such [upstream] table, got {sorted(self.upstream)}"
                )
            if foreign := sorted(set(arm.ops) - set(() if name in WHOLE else self.ops)):
                known = "none, since this arm has every op" if name in WHOLE else f"ops of {sorted(self.ops)}"
                raise ValueError(f"[arms.{name}] ops: expected {known}, got {foreign}")
        for name, target in self.targets.items():
            if foreign := sorted(target.ops_within_us.keys() - self.ops.keys()):
                raise ValueError(f"[targets.{name}] ops_within_us: expected ops of {sorted(self.ops)}, got {foreign}")
        return self


def load_config(path: Path) -> Config:
    """Read and check `config.toml`; a UsageError names the file and the key."""
    return validate(Config, read_toml(path), path)
