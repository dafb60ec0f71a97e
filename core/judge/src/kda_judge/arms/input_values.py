"""Seeded values for a row's inputs, in families that each catch another kind of wrong kernel."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from kda_judge.arms import index_values
from kda_judge.arms.arena import as_bits
from kda_judge.contract.captured import BITS, captured
from kda_judge.contract.errors import UsageError

if TYPE_CHECKING:
    import torch

    from kda_judge.contract.tensor_spec import TensorSpec
    from kda_judge.contract.workloads import Workload

OFFSET = 64.0
"""Common offset of the `offset` family: one-pass variance in fp32 loses digits here, two-pass does not."""
COARSE_OFFSET = 4.0
"""The same for float8, which has nothing between 60 and 64."""
MIXED_EXPONENT = 6
"""The `mixed` family scales each element by 2^u, u uniform in [-6, 6]."""
ZEROS = 1 / 64
"""Share of the `mixed` family's elements that are exactly zero, as padding and masks are."""


class Family(str, Enum):
    """How normal-filled activations (two dimensions or more) are drawn. Weights stay N(0, 1)."""

    NORMAL = "normal"
    """N(0, 1)."""
    OFFSET = "offset"
    """N(0, 1) + 64; `arange` indices are permuted, so that an op that ignores them is found."""
    MIXED = "mixed"
    """N(0, 1) times 2^u, and some zeros; `arange` indices are reversed."""

    @property
    def magnitude(self) -> float:
        """Size of the inputs; absolute tolerances, stated for inputs of order one, scale with it."""
        return {Family.NORMAL: 1.0, Family.OFFSET: OFFSET, Family.MIXED: 2.0**MIXED_EXPONENT}[self]


def make(row: Workload, family: Family, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors with the row's logical values (not its strides), one per input that the row gives.

    The same (row, family, seed, device type) gives the same values in every process.
    """
    import torch

    generator = torch.Generator(device=device)
    # The row's id is part of the seed, so that two rows of one shape do not share values.
    generator.manual_seed(zlib.crc32(f"{row.id}/{family.value}/{seed}".encode()))
    values: dict[str, torch.Tensor] = {}
    orders: dict[int, torch.Tensor] = {}
    # A block table follows from the lengths of its sequences, so it is drawn after them.
    for name, spec in sorted(row.inputs.items(), key=lambda item: item[1].lengths is not None):
        if spec.fill == "captured":
            values[name] = _captured(spec, orders, generator)
        elif spec.fill == "block_table":
            lengths = values[spec.lengths] if spec.lengths is not None else None
            values[name] = index_values.block_table(spec, lengths, generator).to(getattr(torch, spec.dtype))
        else:
            values[name] = _fill(spec, family, generator, device)
    return {name: values[name] for name in row.inputs}


def nudged(values: Mapping[str, torch.Tensor], seed: str) -> dict[str, torch.Tensor]:
    """`values` with every float32 element moved to the next float32 above or below, at random."""
    import torch

    def moved(value: torch.Tensor) -> torch.Tensor:
        if value.dtype != torch.float32:
            return value
        up = torch.rand(value.shape, generator=generator, device=value.device) < 1 / 2
        return torch.nextafter(value, torch.where(up, math.inf, -math.inf))

    generator = torch.Generator(device=next(iter(values.values())).device)
    generator.manual_seed(zlib.crc32(seed.encode()))
    return {name: moved(value) for name, value in values.items()}


def _fill(spec: TensorSpec, family: Family, generator: torch.Generator, device: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    if spec.stride is not None and 0 in spec.stride:
        # A broadcast dimension holds one value, which the whole view shows.
        shape = tuple(1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True))
        collapsed = spec.model_copy(update={"shape": shape, "stride": None})
        return _fill(collapsed, family, generator, device).expand(spec.shape)
    if spec.fill == "arange":
        count = max(spec.shape[-1], 1)
        line = torch.arange(count, device=device)
        if family is Family.OFFSET:
            line = line[torch.randperm(count, generator=generator, device=device)]
        elif family is Family.MIXED:
            line = line.flip(0)
        return line.expand(spec.shape).to(dtype).contiguous()
    if spec.fill == "randint":
        assert spec.high is not None
        return torch.randint(spec.low, spec.high, spec.shape, generator=generator, device=device).to(dtype)
    if spec.fill == "slots":
        return index_values.slots(spec, generator).to(dtype)
    if spec.fill == "expert_ids":
        return index_values.expert_ids(spec, generator).to(dtype)
    if spec.fill == "scale":
        exponent = torch.rand(spec.shape, generator=generator, device=device, dtype=torch.float32)
        return torch.exp2((2 * exponent - 1) * MIXED_EXPONENT).to(dtype)
    if spec.fill in ("cos", "sin", "cos_sin"):
        return _rotary(spec, device).to(dtype)
    values = torch.randn(spec.shape, generator=generator, device=device, dtype=torch.float32)
    if len(spec.shape) > 1 and family is Family.OFFSET:
        values += COARSE_OFFSET if spec.dtype == "float8_e4m3fn" else OFFSET
    elif len(spec.shape) > 1 and family is Family.MIXED:
        exponent = torch.rand(spec.shape, generator=generator, device=device, dtype=torch.float32)
        values *= torch.exp2((2 * exponent - 1) * MIXED_EXPONENT)
        values.masked_fill_(torch.rand(spec.shape, generator=generator, device=device) < ZEROS, 0)
    return values.to(dtype)


def _captured(spec: TensorSpec, orders: dict[int, torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    """The file's values. With `shuffle`, inputs of equally many rows get the same drawn order, kept in `orders`."""
    import torch

    values = torch.from_numpy(captured(spec).copy()).to(generator.device)
    if spec.dtype in BITS:
        values = values.view(getattr(torch, spec.dtype))
    if spec.shuffle and spec.shape:
        rows = spec.shape[0]
        if rows not in orders:
            orders[rows] = torch.randperm(rows, generator=generator, device=generator.device)
        values = as_bits(values).index_select(0, orders[rows]).view(values.dtype)
    return values


def _rotary(spec: TensorSpec, device: str) -> torch.Tensor:
    """Rotary tables: angle(p, j) = p * 10000^(-j/n). Positions run along the longest dimension but the last.

    `cos` and `sin` fill the whole last dimension (n = its size); `cos_sin` puts cosines into its
    first half and sines into its second (n = half of it).
    """
    import torch

    if len(spec.shape) < 2:
        raise UsageError(f"fill {spec.fill!r} needs two dimensions or more, got shape {list(spec.shape)}")
    width = spec.shape[-1] // 2 if spec.fill == "cos_sin" else spec.shape[-1]
    axis = max(range(len(spec.shape) - 1), key=lambda d: spec.shape[d])
    frequency = torch.exp2(-torch.arange(width, device=device, dtype=torch.float64) / width * 13.287712379549449)
    angle = torch.arange(spec.shape[axis], device=device, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.cos(), angle.sin()], -1) if spec.fill == "cos_sin" else getattr(angle, spec.fill)()
    view = [1] * len(spec.shape)
    view[axis], view[-1] = spec.shape[axis], spec.shape[-1]
    return table.view(view).expand(spec.shape).to(torch.float32)
