# ruff: noqa: ARG001 - an oracle has the op's signature, and computes what is exact
"""The float64 oracles, the bytes that the ops must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
LEAST = 1e-10
"""Lower bound of a group's largest element, for groups of zeros."""
INPUTS = ["input", "output_q", "output_s"]
DTYPES = ("float16", "bfloat16", "float32")


def per_token_group_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """What output_q [rows, columns] shall hold before it is rounded, and output_s [rows, groups]; float64."""
    groups = input.double().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1).clamp(min=LEAST) / LARGEST
    return (groups / scales.unsqueeze(-1)).flatten(-2), scales


def silu_and_mul_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the gated SiLU, which is rounded to input's dtype first, as upstream does."""
    gate, up = input.double().chunk(2, dim=-1)
    return per_token_group_quant((gate * torch.sigmoid(gate) * up).to(input.dtype), output_q, output_s, group_size)


def bytes_moved(workload: Workload) -> int:
    """Input read once, both outputs written once."""
    return sum(spec.nbytes for spec in workload.inputs.values())


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    expect(sorted(workload.inputs) == INPUTS, "inputs", str(INPUTS), sorted(workload.inputs))
    expect(set(workload.scalars) <= {"group_size"}, "scalars", "['group_size'] or none", sorted(workload.scalars))
    x, q, s = (workload.inputs[name] for name in INPUTS)
    group = workload.scalars.get("group_size", 128)
    halves = 2 if workload.op == "silu_and_mul_quant" else 1
    expect(len(x.shape) == 2 and x.shape[1] > 0, "input", "2 dimensions [rows, columns]", list(x.shape))
    expect(x.dtype in DTYPES, "input", f"dtype {', '.join(DTYPES)}", x.dtype)
    whole = isinstance(group, int) and group > 0 and x.shape[1] % (halves * group) == 0
    expect(whole, "group_size", f"a divisor of the {x.shape[1] // halves} columns to quantise", group)
    wanted = (x.shape[0], x.shape[1] // halves)
    for name, spec, shape, dtype in (
        ("output_q", q, wanted, "float8_e4m3fn"),
        ("output_s", s, (wanted[0], wanted[1] // int(group)), "float32"),
    ):
        expect(spec.shape == shape, name, f"shape {list(shape)}", list(spec.shape))
        expect(spec.dtype == dtype, name, f"dtype {dtype}", spec.dtype)
    for name, spec in (("input", x), ("output_q", q)):
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
