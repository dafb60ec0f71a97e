"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

COLUMNS_STEP, MAX_COLUMNS = 4, 8192
"""Upstream's number of columns is a multiple of the first and at most the second."""
OPERANDS = ("scale", "shift")


def fused_layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor]:
    """What y shall be, [B, S, D] float64, without any of the chain's roundings."""
    y = x.to(torch.float64, copy=True)
    y -= y.mean(dim=-1, keepdim=True)
    y /= torch.sqrt(torch.linalg.vector_norm(y, dim=-1, keepdim=True).square() / y.shape[-1] + eps)
    y *= 1 + scale.double()[:, None]
    if shift is not None:
        y += shift.double()[:, None]
    return (y,)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    names = set(workload.inputs)
    expect({"x", "scale"} <= names <= {"x", "scale", "shift"}, "inputs", "x, scale and shift or not", sorted(names))
    x = workload.inputs["x"]
    expect(x.dtype == "bfloat16", "x", "dtype bfloat16", x.dtype)
    expect(len(x.shape) == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    batch, _, columns = x.shape
    fits = columns % COLUMNS_STEP == 0 and 0 < columns <= MAX_COLUMNS
    expect(fits, "x", f"D a multiple of {COLUMNS_STEP} up to {MAX_COLUMNS}", columns)
    for name in names & set(OPERANDS):
        spec = workload.inputs[name]
        expect(spec.shape == (batch, columns), name, f"shape {[batch, columns]}", list(spec.shape))
        expect(spec.dtype == x.dtype, name, f"dtype {x.dtype}, as x", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
    expect(set(workload.scalars) == {"eps"}, "scalars", "eps", sorted(workload.scalars))
