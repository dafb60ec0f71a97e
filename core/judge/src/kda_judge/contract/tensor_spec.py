"""One tensor of a row: shape, dtype, and how it gets its values: the kinds of `fill`, and the keys that each reads."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.strict_models import Strict

Size = Annotated[int, Field(ge=0, le=1 << 40)]
"""Size or stride of a dimension, in elements; no machine holds a larger tensor."""
DType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool"]
ITEM_SIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
INDICES = frozenset({"int64", "int32", "bool"})
"""Dtypes that say where something is; int8 and uint8 are quantised values, or their scales."""
INTEGRAL = INDICES | {"int8", "uint8"}
Fill = Literal[
    "normal", "arange", "randint", "cos", "sin", "cos_sin", "scale", "slots", "block_table", "expert_ids", "captured"
]
KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "randint": (("high",), ("low",)),
    "slots": (("high",), ()),
    "block_table": (("high",), ("lengths", "block")),
    "expert_ids": (("high",), ("skew", "counts")),
    "captured": (("file", "sha256"), ("low", "high", "shuffle")),
}
"""Fill -> the keys that it needs, and those that it may have. Fills that are not here read no key."""
DEFAULTS: Mapping[str, object] = {
    "low": 0,
    "high": None,
    "lengths": None,
    "block": 1,
    "skew": 1.0,
    "counts": None,
    "file": None,
    "sha256": None,
    "shuffle": False,
}
INTEGER_FILLS = ("arange", "randint", "slots", "block_table", "expert_ids", "captured")
INDEX_FILLS = frozenset({"slots", "block_table", "expert_ids"})
"""Fills whose values are positions in something else: they need integers, and no stride of 0, which repeats values."""
RANGE: Mapping[str, tuple[int, int]] = {"int8": (-128, 127), "uint8": (0, 255)}
"""Dtype -> its least and largest value, where `low` or `high` may lie outside them."""


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements between the first and the last one of a strided view, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class OutputSpec(Strict):
    """One new tensor that an op returns, contiguous."""

    shape: tuple[Size, ...]
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

    stride: tuple[Size, ...] | None = None
    fill: Fill = "normal"
    """`normal`: N(0, 1), in families; `arange`; `randint`: integers from `low` to below `high`; `cos`, `sin`,
    `cos_sin`: rotary tables; `scale`: 2^u, u uniform in [-6, 6]; `slots`: below `high`, none twice; `block_table`:
    slots of a sequence's blocks; `expert_ids`: different ones for each token, some more often than others; `captured`:
    from a file."""
    low: int = 0
    """Lower bound of `randint` and of captured integers."""
    high: Annotated[int, Field(gt=0)] | None = None
    """Exclusive upper bound of integers: size of what they point into."""
    lengths: str | None = None
    """`block_table`: the input that says how many tokens each sequence has. Entries after its last block are 0."""
    block: Annotated[int, Field(gt=0)] = 1
    """`block_table`: tokens of a block."""
    skew: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """`expert_ids`: the r-th most popular expert is chosen in proportion to r^-skew (Zipf's law; 0 is uniform)."""
    counts: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """`expert_ids`: in place of `skew`, how often a run chose each expert."""
    file: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/-]*\.npy$")
    """`captured`: the file, relative to that of the rows."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """`captured`: the digest of the whole file."""
    shuffle: bool = False
    """`captured`: its rows come in an order drawn from the seed, the same one for inputs of equally many rows."""

    @model_validator(mode="after")
    def _consistent(self) -> TensorSpec:
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise ValueError(f"stride has {len(self.stride)} entries, shape has {len(self.shape)}")
        reason = wrong(self)
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, contiguous where none were given."""
        return super().strides if self.stride is None else self.stride


def distinct(spec: TensorSpec) -> int:
    """How many different values below `high` the fill has to find."""
    if spec.fill == "expert_ids":
        return spec.shape[-1] if spec.shape else 1
    return prod(spec.shape) if spec.fill in INDEX_FILLS else 0


def wrong(spec: TensorSpec) -> str | None:
    """Why the keys of `spec`, an input of a row, do not fit its fill, its dtype or each other, or None."""
    integral = spec.dtype in INTEGRAL
    needs, takes = KEYS.get(spec.fill, ((), ()))
    given = [key for key, default in DEFAULTS.items() if getattr(spec, key) != default]
    for key in needs:
        if key not in given:
            return f"fill = {spec.fill!r} needs `{key}`"
    for key in given:
        if key not in (*needs, *takes):
            return f"fill = {spec.fill!r} takes no `{key}`, only {[*needs, *takes]}"
    if integral and spec.fill not in INTEGER_FILLS:
        return f"dtype {spec.dtype} needs fill {', '.join(map(repr, INTEGER_FILLS))}, got {spec.fill!r}"
    if spec.fill in INDEX_FILLS and (not integral or spec.dtype in RANGE or spec.dtype == "bool"):
        return f"fill = {spec.fill!r} needs dtype int32 or int64, got {spec.dtype}"
    if spec.stride is not None and 0 in spec.stride and (spec.fill in INDEX_FILLS or spec.fill == "captured"):
        return f"fill = {spec.fill!r}: expected no stride of 0, which repeats values, got {list(spec.stride)}"
    if spec.fill == "captured" and integral and spec.high is None:
        return "captured integers need `high`, the bound that they stay below"
    if spec.fill == "block_table" and len(spec.shape) != 2:
        return f"fill = 'block_table': expected shape [sequences, blocks], got {list(spec.shape)}"
    return _out_of_bounds(spec)


def _out_of_bounds(spec: TensorSpec) -> str | None:
    if spec.high is None:
        return None
    if spec.low >= spec.high:
        return f"expected low below high, got low = {spec.low}, high = {spec.high}"
    least, most = RANGE.get(spec.dtype, (spec.low, spec.high - 1))
    if spec.low < least or spec.high - 1 > most:
        return f"dtype {spec.dtype} holds {least} to {most}, got low = {spec.low}, high = {spec.high} (exclusive)"
    if distinct(spec) > spec.high:
        return f"fill = {spec.fill!r}: {distinct(spec)} different values below high = {spec.high} do not exist"
    if spec.counts is not None:
        if len(spec.counts) != spec.high:
            return f"counts: expected one for each of high = {spec.high} experts, got {len(spec.counts)}"
        if sum(count > 0 for count in spec.counts) < distinct(spec):
            return f"counts: expected {distinct(spec)} experts or more that were chosen at all"
        if spec.skew != DEFAULTS["skew"]:
            return "expected `skew` or `counts`, got both"
    return None
