"""Rows of `bench/workloads.toml`: typed, checked, and shrunken for machines without a GPU."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from kda_judge.contract.captured import captured
from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import expect_matches
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_judge.contract.tensor_spec import INDICES, OutputSpec, TensorSpec, distinct

Scalar = bool | int | float | str
SHRINK_ABOVE = 8
"""Sizes up to this stay as they are on the CPU; larger ones keep their remainder modulo this."""


class Workload(Strict):
    """One row: an op, its inputs and scalars. Frozen once results refer to it."""

    id: str = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    op: str
    models: tuple[str, ...] = ()
    note: str | None = None
    """Why the row is there."""
    production: bool = False
    calls_a_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How often one step of the model (a denoising step, a decoded token) calls the op like this."""
    inplace: tuple[str, ...] = ()
    restore: bool = False
    """In place: every timed call works on values as drawn, since a call on its own output would be a different call. A
    sample then has as many calls as there are copies of the inputs."""
    loop: str | None = None
    """In place without `restore`: why a timed call may work on the output of the call before."""
    inputs: dict[str, TensorSpec]
    outputs: dict[str, OutputSpec] = {}
    """The outputs that the op's `per_row` names. All others are inputs, or like one."""
    scalars: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _inplace_are_inputs(self) -> "Workload":
        for name in self.inplace:
            if name not in self.inputs:
                raise ValueError(f"inplace names {name!r}, inputs are {sorted(self.inputs)}")
        for key in ("restore", "loop"):
            if getattr(self, key) and not self.inplace:
                raise ValueError(f"{key} is for ops that work in place, and `inplace` names no input")
        if self.restore and self.loop:
            raise ValueError("expected `restore` or `loop`, got both: with the first no call works on its own output")
        return self

    @model_validator(mode="after")
    def _inputs_fit_each_other(self) -> "Workload":
        for name, spec in self.inputs.items():
            if spec.lengths is None:
                continue
            lengths = self.inputs.get(spec.lengths)
            if lengths is None or lengths.dtype not in INDICES or lengths.high is None:
                raise ValueError(
                    f"inputs.{name}: lengths = {spec.lengths!r}: expected an input of integers with `high`"
                )
            if lengths.shape != spec.shape[:1]:
                raise ValueError(
                    f"inputs.{name}: lengths = {spec.lengths!r}: expected shape {list(spec.shape[:1])}, one for each "
                    f"sequence, got {list(lengths.shape)}"
                )
            if lengths.high - 1 > spec.shape[1] * spec.block:
                raise ValueError(
                    f"inputs.{name}: {spec.shape[1]} blocks of {spec.block} tokens do not hold the longest sequence of "
                    f"{spec.lengths!r}, {lengths.high - 1} tokens"
                )
        if self.inputs and all(spec.fill == "captured" and not spec.shuffle for spec in self.inputs.values()):
            raise ValueError("every input is captured: an op could remember its result; `shuffle` one, or draw one")
        return self


class WorkloadFile(Strict):
    """The whole file: a list of `[[workload]]` tables."""

    workload: tuple[Workload, ...] = Field(min_length=1)


def load_workloads(path: Path) -> tuple[Workload, ...]:
    """Read the frozen rows; a UsageError names the file, the key, and duplicate ids."""
    data = read_toml(path)
    rows = tuple(_with_captured(row, path) for row in validate(WorkloadFile, data, path).workload)
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise UsageError(f"{path}: duplicate workload id {row.id!r}; ids name results and must be unique")
        seen.add(row.id)
    return rows


def _with_captured(row: Workload, path: Path) -> Workload:
    """The row with the full paths of its captured files, which are read and checked now."""
    found = {name: spec.file for name, spec in row.inputs.items() if spec.file is not None}
    if not found:
        return row
    files = {
        name: row.inputs[name].model_copy(update={"file": str(path.parent / file)}) for name, file in found.items()
    }
    for name, spec in files.items():
        try:
            captured(spec)
        except UsageError as error:
            raise UsageError(f"{path}: row {row.id!r}: key 'inputs.{name}.file': {error}") from None
    return row.model_copy(update={"inputs": {**row.inputs, **files}})


def select(rows: tuple[Workload, ...], patterns: list[str]) -> tuple[Workload, ...]:
    """Rows whose id matches any shell pattern, in file order; an unmatched pattern is a UsageError."""
    expect_matches("--rows", patterns, [row.id for row in rows])
    return tuple(row for row in rows if not patterns or any(fnmatchcase(row.id, p) for p in patterns))


def shrink(
    row: Workload, keep: Mapping[str, tuple[int, ...]], always: Mapping[str, tuple[int, ...]] | None = None
) -> Workload:
    """The same row, small enough for a CPU: every size n > 8 becomes 8 + n % 8.

    Equal sizes stay equal across inputs, multiples of 8 stay multiples of 8, and odd tails stay
    odd, so that the row takes the same path through a kernel. The last dimension (but not of
    indices, which run along tokens), the dimensions in `keep`, and the strides of views keep their values. The
    dimensions in `always` shrink whatever they equal, as a picture of 256 x 256 does although it has 256 channels.
    Outputs of the row count as inputs do, so that sizes stay equal there too; a size that is a sum or product of others
    has to be in `keep`. Captured inputs, and the sizes that they point into, stay as they are. Where values below
    `high` must all differ, `high` stays large enough.
    """
    always = always or {}
    specs: dict[str, OutputSpec] = {**row.inputs, **row.outputs}
    least: dict[int, int] = {}

    def small(size: int) -> int:
        smallest = size if size <= SHRINK_ABOVE else SHRINK_ABOVE + size % SHRINK_ABOVE
        return max(
            smallest, smallest + (least.get(size, 0) - smallest + SHRINK_ABOVE - 1) // SHRINK_ABOVE * SHRINK_ABOVE
        )

    kept = {spec.shape[dim] for name, dims in keep.items() if (spec := specs.get(name)) for dim in dims}
    kept |= {
        spec.shape[-1]
        for name, spec in specs.items()
        if len(spec.shape) > 1 and spec.dtype not in INDICES and len(spec.shape) - 1 not in always.get(name, ())
    }

    fixed = {name for name, spec in row.inputs.items() if spec.fill == "captured"}
    fixed |= {name for name, spec in row.inputs.items() if spec.lengths in fixed}
    for name in fixed:
        kept |= {*row.inputs[name].shape, row.inputs[name].high or 0}

    def shape(name: str) -> tuple[int, ...]:
        small_ones = always.get(name, ())
        return tuple(small(n) if dim in small_ones or n not in kept else n for dim, n in enumerate(specs[name].shape))

    for name, spec in row.inputs.items():
        if spec.high is not None:
            needed = distinct(spec.model_copy(update={"shape": shape(name)}))
            least[spec.high] = max(least.get(spec.high, 0), needed)
    inputs = {}
    for name, spec in row.inputs.items():
        # Values that do not start at 0, or have a narrow dtype, are amounts, not positions in a size that shrinks.
        pointing = spec.low == 0 and spec.dtype in INDICES and spec.high not in kept
        high = small(spec.high) if spec.high is not None and pointing else spec.high
        # Keep the experts that were chosen most.
        counts = spec.counts and tuple(sorted(spec.counts, reverse=True)[:high])
        inputs[name] = spec.model_copy(update={"shape": shape(name), "high": high, "counts": counts})
    for spec in tuple(inputs.values()):
        if spec.lengths is not None and (high := inputs[spec.lengths].high) is not None:
            lengths, high = inputs[spec.lengths], min(high, spec.shape[1] * spec.block + 1)
            inputs[spec.lengths] = lengths.model_copy(update={"low": min(lengths.low, high - 1), "high": high})
    outputs = {name: spec.model_copy(update={"shape": shape(name)}) for name, spec in row.outputs.items()}
    return row.model_copy(update={"inputs": inputs, "outputs": outputs})
