"""Rows of `bench/workloads.toml`: typed, checked, and shrunken for machines without a GPU."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_core.errors import UsageError
from kda_core.suggest import expect_matches
from kda_core.toml import Strict, read_toml, validate

DType = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "bool"]
Fill = Literal["normal", "arange", "randint", "cos", "sin", "cos_sin"]
Scalar = bool | int | float | str
ITEM_SIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}
INTEGRAL = frozenset({"int64", "int32", "bool"})
SHRINK_ABOVE = 8
"""Sizes up to this stay as they are on the CPU; larger ones keep their remainder modulo this."""


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements between the first and the last one of a strided view, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class OutputSpec(Strict):
    """One new tensor that an op returns, contiguous."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: DType

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        steps: list[int] = []
        step = 1
        for size in reversed(self.shape):
            steps.append(step)
            step *= max(size, 1)
        return tuple(reversed(steps))

    @property
    def span(self) -> int:
        """Elements of the buffer that the tensor reaches into."""
        return span(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's distinct elements: dimensions of stride 0 are read once."""
        distinct = prod(n for n, step in zip(self.shape, self.strides, strict=True) if step != 0)
        return distinct * ITEM_SIZE[self.dtype]


class TensorSpec(OutputSpec):
    """One input tensor; `stride` in elements makes it a view into a larger buffer."""

    stride: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    fill: Fill = "normal"
    high: Annotated[int, Field(gt=0)] | None = None
    """Exclusive upper bound of `randint`."""

    @model_validator(mode="after")
    def _consistent(self) -> "TensorSpec":
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise ValueError(f"stride has {len(self.stride)} entries, shape has {len(self.shape)}")
        if self.fill == "randint" and self.high is None:
            raise ValueError("fill = 'randint' needs `high`")
        if self.dtype in INTEGRAL and self.fill not in ("arange", "randint"):
            raise ValueError(f"dtype {self.dtype} needs fill 'arange' or 'randint', got {self.fill!r}")
        return self

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, contiguous where none were given."""
        return super().strides if self.stride is None else self.stride


class Workload(Strict):
    """One row: an op, its inputs and scalars. Frozen once results refer to it."""

    id: str = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    op: str
    models: tuple[str, ...] = ()
    note: str | None = None
    """Why the row is there."""
    production: bool = False
    inplace: tuple[str, ...] = ()
    inputs: dict[str, TensorSpec]
    outputs: dict[str, OutputSpec] = {}
    """Those that the op's `per_row` names: its other outputs are inputs, or like one."""
    scalars: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _inplace_are_inputs(self) -> "Workload":
        for name in self.inplace:
            if name not in self.inputs:
                raise ValueError(f"inplace names {name!r}, inputs are {sorted(self.inputs)}")
        return self


class WorkloadFile(Strict):
    """The whole file: a list of `[[workload]]` tables."""

    workload: tuple[Workload, ...] = Field(min_length=1)


def load_workloads(path: Path) -> tuple[Workload, ...]:
    """Read the frozen rows; a UsageError names the file, the key, and duplicate ids."""
    data = read_toml(path)
    rows = validate(WorkloadFile, data, path).workload
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise UsageError(f"{path}: duplicate workload id {row.id!r}; ids name results and must be unique")
        seen.add(row.id)
    return rows


def select(rows: tuple[Workload, ...], patterns: list[str]) -> tuple[Workload, ...]:
    """Rows whose id matches any shell pattern, in file order; an unmatched pattern is a UsageError."""
    expect_matches("--rows", patterns, [row.id for row in rows])
    return tuple(row for row in rows if not patterns or any(fnmatchcase(row.id, p) for p in patterns))


def shrink(
    row: Workload, keep: Mapping[str, tuple[int, ...]], always: Mapping[str, tuple[int, ...]] | None = None
) -> Workload:
    """The same row, small enough for a CPU: every size n > 8 becomes 8 + n % 8.

    Equal sizes stay equal across inputs, multiples of 8 stay multiples of 8, and odd tails stay
    odd, so that the row takes the same path through a kernel. The last dimension (of indices, which
    run along tokens, not), the dimensions in `keep`, and the strides of views keep their values. The dimensions in
    `always` shrink whatever they equal, as a picture of 256 x 256 does although it has 256 channels. Outputs of the row
    count as inputs do, so that sizes stay equal there too; one that is a sum or product of others has to be in `keep`.
    """
    always = always or {}
    specs: dict[str, OutputSpec] = {**row.inputs, **row.outputs}

    def small(size: int) -> int:
        return size if size <= SHRINK_ABOVE else SHRINK_ABOVE + size % SHRINK_ABOVE

    kept = {spec.shape[dim] for name, dims in keep.items() if (spec := specs.get(name)) for dim in dims}
    kept |= {
        spec.shape[-1]
        for name, spec in specs.items()
        if len(spec.shape) > 1 and spec.dtype not in INTEGRAL and len(spec.shape) - 1 not in always.get(name, ())
    }

    def shape(name: str) -> tuple[int, ...]:
        small_ones = always.get(name, ())
        return tuple(small(n) if dim in small_ones or n not in kept else n for dim, n in enumerate(specs[name].shape))

    inputs = {
        name: spec.model_copy(
            update={
                "shape": shape(name),
                "high": spec.high if spec.high is None or spec.high in kept else small(spec.high),
            }
        )
        for name, spec in row.inputs.items()
    }
    outputs = {name: spec.model_copy(update={"shape": shape(name)}) for name, spec in row.outputs.items()}
    return row.model_copy(update={"inputs": inputs, "outputs": outputs})
