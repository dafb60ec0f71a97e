"""The float64 oracle, the bytes that must move, and the contract of a row."""

from math import prod

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

L2_BYTES = 60_000_000
"""Bytes of an H200's L2 cache in which a kernel can hope to find again what it read before."""
DTYPES = ("float16", "bfloat16", "float32")


def triton_group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float = 1e-5
) -> tuple[torch.Tensor]:
    """What the op shall return, [batch, channels, ...] float64."""
    rows = x.double().reshape(x.shape[0] * num_groups, -1)  # [groups of all batches, elements of a group]
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows /= torch.sqrt(rows.square().mean(dim=1, keepdim=True) + eps)
    y = rows.view(x.shape[0], x.shape[1], -1)
    y = y * weight.double()[:, None] + bias.double()[:, None]
    return ((y * torch.sigmoid(y)).view(x.shape),)


def bytes_moved(workload: Workload) -> int:
    """Read x, weight and bias once, write y once, and read again the part of each group beyond the L2 cache's size.

    A second reading is needed because the first one has to be over before anything can be written. But groups do not
    depend on each other: a kernel that takes one group at a time finds it in the cache, however large the tensor is.
    """
    inputs = workload.inputs
    groups = inputs["x"].shape[0] * int(workload.scalars["num_groups"])
    again = groups * max(0, inputs["x"].nbytes // max(groups, 1) - L2_BYTES)
    return sum(spec.nbytes for spec in inputs.values()) + inputs["x"].nbytes + again


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    expect(set(inputs) == {"x", "weight", "bias"}, "inputs", "x, weight, bias", sorted(inputs))
    expect({"num_groups"} <= set(scalars) <= {"num_groups", "eps"}, "scalars", "num_groups, eps", sorted(scalars))
    x, groups = inputs["x"], scalars["num_groups"]
    expect(len(x.shape) in (2, 3, 4, 5), "x", "2 to 5 dimensions [batch, channels, ...]", list(x.shape))
    expect(prod(x.shape) > 0, "x", "elements", list(x.shape))
    expect(isinstance(groups, int) and groups > 0, "num_groups", "a positive integer", groups)
    expect(x.shape[1] % int(groups) == 0, "num_groups", f"a divisor of {x.shape[1]} channels", groups)
    expect(x.dtype in DTYPES, "x", f"dtype {', '.join(DTYPES)}", x.dtype)
    for name in ("weight", "bias"):
        spec = inputs[name]
        expect(spec.shape == x.shape[1:2], name, f"shape {list(x.shape[1:2])}", list(spec.shape))
        # With another dtype upstream takes PyTorch's group_norm, which refuses some of the mixtures.
        expect(spec.dtype == x.dtype, name, f"dtype {x.dtype}, as x", spec.dtype)
