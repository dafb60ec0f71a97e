"""The float64 oracles and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import ITEM_SIZE
from kda_judge.contract.workloads import Workload

MAX_ROW_BYTES = 65536
"""Upstream holds a row in one block of registers and refuses larger ones."""
DTYPES = ("float16", "bfloat16", "float32")


def norm_infer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor]:
    """What the op shall return, [rows, columns] float64; `out` is no argument of a row."""
    wide = x.double()
    if not is_rms_norm:
        wide = wide - wide.sum(dim=-1, keepdim=True) / wide.shape[-1]
    y = wide / torch.sqrt(wide.pow(2).sum(dim=-1, keepdim=True) / wide.shape[-1] + eps)
    if weight is not None:
        y *= weight.double()
    if bias is not None:
        y += bias.double()
    return (y,)


def triton_one_pass_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor]:
    """What the op shall return, [..., columns] float64."""
    return norm_infer(x, w, None, eps, is_rms_norm=True)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    general = workload.op == "norm_infer"
    needed, allowed = ({"x"}, {"x", "weight", "bias"}) if general else ({"x", "w"}, {"x", "w"})
    expect(needed <= set(inputs) <= allowed, "inputs", f"{sorted(needed)} of {sorted(allowed)}", sorted(inputs))
    x = inputs["x"]
    if general:
        expect(len(x.shape) == 2, "x", "2 dimensions [rows, columns]", list(x.shape))
    expect(len(x.shape) > 0, "x", "1 dimension or more", list(x.shape))
    expect(x.strides[-1] == 1, "x", "stride 1 in its last dimension", x.strides[-1])
    row = x.shape[-1] * ITEM_SIZE[x.dtype]
    expect(0 < row <= MAX_ROW_BYTES, "x", f"rows of 1 to {MAX_ROW_BYTES} bytes", row)
    for name, spec in inputs.items():
        expect(spec.dtype in DTYPES, name, f"dtype {', '.join(DTYPES)}", spec.dtype)
        expect(name == "x" or spec.shape == x.shape[-1:], name, f"shape {list(x.shape[-1:])}", list(spec.shape))
    known = {"eps", "is_rms_norm"} if general else {"eps"}
    expect(set(scalars) <= known, "scalars", str(sorted(known)), sorted(scalars))
    expect("eps" in scalars or not general, "eps", "a number", "nothing")
    expect(isinstance(scalars.get("is_rms_norm", False), bool), "is_rms_norm", "true or false", scalars)
