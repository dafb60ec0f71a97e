"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import math

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

FLOATS = ("float16", "bfloat16", "float32")


def fused_gelu_tanh_cat(attn: torch.Tensor, mlp: torch.Tensor) -> tuple[torch.Tensor]:
    """[..., A + M] float64."""
    y = torch.empty(*attn.shape[:-1], attn.shape[-1] + mlp.shape[-1], dtype=torch.float64, device=attn.device)
    y[..., : attn.shape[-1]] = attn
    # In place: the largest row has gigabytes in float64. x / 2 * (1 + tanh(u)) is x / (1 + exp(-2 u)), which keeps its
    # digits where tanh is near -1.
    x = mlp.double()
    y[..., attn.shape[-1] :] = (x * x).mul_(0.044715).add_(1).mul_(x).mul_(-2 * math.sqrt(2 / math.pi)).exp_().add_(1)
    y[..., attn.shape[-1] :].reciprocal_().mul_(x)
    return (y,)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    expect(set(workload.inputs) == {"attn", "mlp"}, "inputs", "attn, mlp", sorted(workload.inputs))
    attn, mlp, y = workload.inputs["attn"], workload.inputs["mlp"], workload.outputs["y"]
    expect(attn.dtype in FLOATS, "attn", f"dtype {' or '.join(FLOATS)}", attn.dtype)
    expect(len(attn.shape) > 0, "attn", "one dimension or more", list(attn.shape))
    *leading, width = attn.shape
    fits = len(mlp.shape) == len(attn.shape) and list(mlp.shape[:-1]) == leading and mlp.dtype == attn.dtype
    expect(fits, "mlp", f"{[*leading, 'M']}, {attn.dtype}", [list(mlp.shape), mlp.dtype])
    wanted = (*leading, width + mlp.shape[-1])
    expect((y.shape, y.dtype) == (wanted, attn.dtype), "y", f"{list(wanted)}, {attn.dtype}", [list(y.shape), y.dtype])
