"""The typed contract of a task: `config.toml`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_core.toml import Strict, read_toml, validate
from kda_core.upstream import Pin

Device = Literal["cuda", "cpu"]
Positive = Annotated[int, Field(gt=0)]


class TaskTable(Strict):
    """What the task is."""

    op: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Unique across families; names the sessions. Equals the folder's name without `kNN_`."""
    title: str
    models: tuple[str, ...] = ()
    """Serving models whose traffic the production rows come from."""


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
    returns: Literal["outputs", "none"] = "outputs"
    """What the callable returns; in-place upstream ops return None."""

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
        if self.returns == "outputs" and any(name in self.inputs for name in self.outputs):
            raise ValueError("an op that works in place must return nothing: returns = 'none'")
        return self


class Arm(Strict):
    """A set of callables with the upstream signatures, imported only inside its own worker."""

    module: str
    """Relative to the task's package: `solution`, `baseline`, `baseline.latest`."""
    upstream: str | None = None
    """Name of the `[upstream."..."]` table to activate before the import."""
    devices: tuple[Device, ...] = ("cuda",)
    compiled: bool = False
    """Wrap every callable in torch.compile."""


class Tolerance(Strict):
    """`|out - ref| <= atol + rtol * |ref|` for every element, with the reason for the numbers."""

    atol: float = Field(ge=0)
    rtol: float = Field(ge=0)
    reason: str


class Target(Strict):
    """What the task aims at on one kind of GPU: geometric means over the production rows."""

    capability: str
    """Compilation target, for example sm_90a."""
    wall_vs_baseline: float | None = None
    wall_vs_latest: float | None = None
    attained: float | None = None
    device: float | None = None
    """For every row: share of the streaming copy's rate to reach on the device where it moves more than 64 MB; smaller
    rows have to be within 1.5 us, or 1.3 times, of the copy's time."""


class Bench(Strict):
    """Benchmark settings; a run records the ones it used."""

    generations: Positive = 3
    """Times both workers are started afresh: host speed differs between processes."""
    samples: Positive = 12
    """Samples per row, arm and generation."""
    target_sample_us: Positive = 20_000
    """Back-to-back calls are added until one `wall` sample lasts this long."""
    seeds: Annotated[tuple[int, ...], Field(min_length=3)] = (11, 23, 47)
    isolate: Literal["none", "workload"] = "none"
    """`workload`: fresh workers for every row, for ops whose state leaks between rows."""
    timeout_s: Positive = 180
    """Longest single command to a worker, the first call's compilation included."""


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
    tolerance: dict[str, Tolerance] = Field(min_length=1)
    """Keyed by the dtype of the output."""
    targets: dict[str, Target] = {}
    bench: Bench = Bench()
    cpu: Cpu = Cpu()

    @model_validator(mode="after")
    def _names_resolve(self) -> "Config":
        for needed in ("baseline", "solution"):
            if needed not in self.arms:
                raise ValueError(f"[arms.{needed}] is required, got arms {sorted(self.arms)}")
        for name, arm in self.arms.items():
            if arm.upstream is not None and arm.upstream not in self.upstream:
                raise ValueError(
                    f"[arms.{name}] upstream = {arm.upstream!r}: no such [upstream] table, got {sorted(self.upstream)}"
                )
        return self


def load_config(path: Path) -> Config:
    """Read and check `config.toml`; a UsageError names the file and the key."""
    return validate(Config, read_toml(path), path)
