"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

DTYPES = ("float16", "bfloat16", "float32")


def silu_and_mul(input: torch.Tensor) -> tuple[torch.Tensor]:
    """What the op shall return, [..., D] float64; no row is left out."""
    gate, up = input.double().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up,)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    expect(set(workload.inputs) == {"input"}, "inputs", "['input']", sorted(workload.inputs))
    expect(not workload.scalars, "scalars", "none", sorted(workload.scalars))
    x, y = workload.inputs["input"], workload.outputs["y"]
    expect(len(x.shape) > 0 and x.shape[-1] > 0, "input", "one dimension or more, with columns", list(x.shape))
    expect(x.shape[-1] % 2 == 0, "input", "an even number of columns", x.shape[-1])
    expect(x.dtype in DTYPES, "input", f"dtype {', '.join(DTYPES)}", x.dtype)
    wanted = (*x.shape[:-1], x.shape[-1] // 2)
    expect(y.shape == wanted, "y", f"shape {list(wanted)}", list(y.shape))
    expect(y.dtype == x.dtype, "y", f"dtype {x.dtype}, as input", y.dtype)
