"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

DIM = 128
HEADS, WEIGHTS = ("q", "k"), ("q_weight", "k_weight")


def rounded_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What q_out and k_out shall be, [B, tokens, heads, head_dim] float64, before their last rounding.

    The roundings to q's dtype after each step of the norm are part of the op, so they are made here, too. The sums are
    in float64: a mean beside the middle of two neighbours may be rounded to the other one by the order of an arm.
    """

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(q.dtype).double()

    tables = cos_sin.double().reshape(-1, q.shape[1], 1, q.shape[3])  # of one batch for all, or of each
    cos, sin = tables.chunk(2, dim=-1)
    results = []
    for x, weight in ((q.double(), q_weight.double()), (k.double(), k_weight.double())):
        mean = rounded(rounded(x * x).mean(dim=-1, keepdim=True))
        factor = rounded(1 / torch.sqrt(rounded(mean + eps)))
        n = rounded(rounded(x * factor) * weight)
        y = torch.empty_like(n)
        y[..., 0::2] = n[..., 0::2] * cos - n[..., 1::2] * sin
        y[..., 1::2] = n[..., 1::2] * cos + n[..., 0::2] * sin
        results.append(y)
    return results[0], results[1]


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, wanted = workload.inputs, {*HEADS, *WEIGHTS, "cos_sin"}
    expect(set(inputs) == wanted, "inputs", f"{sorted(wanted)}", sorted(inputs))
    q = inputs["q"]
    expect(len(q.shape) == 4, "q", "4 dimensions [B, tokens, heads, head_dim]", list(q.shape))
    batch, tokens, _, dim = q.shape
    expect(dim == DIM, "q", f"head_dim {DIM}", dim)
    expect(q.dtype in ("float16", "bfloat16"), "q", "dtype float16 or bfloat16", q.dtype)
    shapes = dict.fromkeys(HEADS, q.shape) | dict.fromkeys(WEIGHTS, (dim,))
    for name, shape in shapes.items():
        expect(inputs[name].shape == shape, name, f"shape {list(shape)}", list(inputs[name].shape))
        expect(inputs[name].dtype == q.dtype, name, f"dtype {q.dtype}, as q", inputs[name].dtype)
        expect(inputs[name].strides[-1] == 1, name, "stride 1 in its last dimension", inputs[name].strides[-1])
    tables = inputs["cos_sin"]
    expect(tables.dtype == "float32", "cos_sin", "dtype float32", tables.dtype)
    fits = tables.shape in ((tokens, dim), (batch * tokens, dim))
    expect(fits, "cos_sin", f"shape {[tokens, dim]} or {[batch * tokens, dim]}", list(tables.shape))
    for name in HEADS:
        spec = workload.outputs.get(f"{name}_out")
        fits = spec is not None and (spec.shape, spec.dtype) == (q.shape, q.dtype)
        expect(fits, f"{name}_out", f"shape {list(q.shape)} and dtype {q.dtype}", spec)
    expect(set(workload.scalars) == {"eps"}, "scalars", "eps", sorted(workload.scalars))
