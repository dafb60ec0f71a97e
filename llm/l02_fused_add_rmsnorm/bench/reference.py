# ruff: noqa: ARG001 - an oracle has the op's signature, and computes what is exact
"""The float64 oracles, the bytes that the ops must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

INPUTS = {"fused_add_rmsnorm": {"input", "residual", "weight"}, "rmsnorm": {"input", "weight", "out"}}
DTYPES = ("float16", "bfloat16", "float32")
MAX_COLUMNS = 16384


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor]:
    """What `out` shall hold afterwards, [rows, columns] float64; the inputs are left alone."""
    wide = input.double()
    return (wide / torch.sqrt(wide.pow(2).sum(dim=-1, keepdim=True) / wide.shape[-1] + eps) * weight.double(),)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What input and residual shall hold afterwards, [rows, columns] float64; the inputs are left alone."""
    total = input.double() + residual.double()
    return (*rmsnorm(total, weight, eps=eps), total)


def bytes_moved(workload: Workload) -> int:
    """Input and weight read; residual read and written; the normalised rows written, over the input or into out."""
    inputs = workload.inputs
    streamed = 2 * inputs["input"].nbytes + inputs["weight"].nbytes
    return streamed + (2 * inputs["residual"].nbytes if "residual" in inputs else 0)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    expect(set(inputs) == INPUTS[workload.op], "inputs", str(sorted(INPUTS[workload.op])), sorted(inputs))
    x = inputs["input"]
    expect(len(x.shape) == 2, "input", "2 dimensions [rows, columns]", list(x.shape))
    expect(0 < x.shape[1] <= MAX_COLUMNS, "input", f"1 to {MAX_COLUMNS} columns", x.shape[1])
    for name, spec in inputs.items():
        shape = x.shape[1:] if name == "weight" else x.shape
        expect(spec.shape == shape, name, f"shape {list(shape)}", list(spec.shape))
        expect(spec.dtype in DTYPES, name, f"dtype {', '.join(DTYPES)}", spec.dtype)
        expect(spec.dtype == x.dtype, name, f"dtype {x.dtype}, as input", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
    expect(set(scalars) <= {"eps"}, "scalars", "['eps'] or none", sorted(scalars))
