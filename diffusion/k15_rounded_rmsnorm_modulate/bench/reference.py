"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

DTYPES = ("float16", "bfloat16")
OPERANDS = ("gate", "scale", "shift", "other_scale", "other_shift")
"""Inputs of one row for each batch."""
NEEDED = {
    "rounded_rmsnorm_modulate": {"x", "scale", "shift"},
    "rounded_residual_rmsnorm_modulate": {"residual", "x"},
    "rounded_residual_rmsnorm_modulate2": {"residual", "x", "scale", "shift", "other_scale", "other_shift"},
}
"""Op -> the inputs that every row of it has."""


def rounded_rmsnorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> tuple[torch.Tensor]:
    """What y shall be, [B, S, D] float64, before its last rounding.

    The roundings to x's dtype before the last one are part of the op, so they are made here, too. The sum is in
    float64: a number beside the middle of two neighbours may be rounded to the other one by the order of an arm.
    """
    return (_modulated(_normed(x, eps), scale, shift),)


def rounded_residual_rmsnorm_modulate(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What y and h shall be, likewise; the norm is that of the rounded h."""
    h = _added(residual, x, gate)
    n = _normed(h.to(x.dtype), eps)
    return (n if scale is None or shift is None else _modulated(n, scale, shift)), h


def rounded_residual_rmsnorm_modulate2(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    other_scale: torch.Tensor,
    other_shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What y, the other modulation and h shall be, likewise."""
    n, h = rounded_residual_rmsnorm_modulate(residual, x, gate, None, None, eps)
    return _modulated(n, scale, shift), _modulated(n, other_scale, other_shift), h


def _added(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Residual plus the rounded product, float64."""
    update = x.double() if gate is None else _rounded(x.double() * gate.double(), x.dtype)
    return update + residual


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of each row, float64, not rounded."""
    n = x.to(torch.float64, copy=True)
    return n.div_((torch.linalg.vector_norm(n, dim=-1, keepdim=True).square() / n.shape[-1] + eps).sqrt_())


def _modulated(n: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The rounded n, times the rounded 1 + scale, rounded, plus shift, float64."""
    factor = _rounded(1 + scale.double(), scale.dtype)
    return _rounded(_rounded(n, scale.dtype) * factor, scale.dtype) + shift


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 `value` as the nearest number of `dtype`."""
    return value.to(dtype).double()


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, needed = workload.inputs, NEEDED[workload.op]
    optional = {"gate", "scale", "shift"} if "residual" in needed else set()
    fits = needed <= set(inputs) <= needed | optional and ("scale" in inputs) == ("shift" in inputs)
    also = f", and perhaps {sorted(optional - needed)}, scale and shift together" if optional else ""
    expect(fits, "inputs", f"{sorted(needed)}{also}", sorted(inputs))
    x = inputs["x"]
    expect(x.dtype in DTYPES, "x", f"dtype {' or '.join(DTYPES)}", x.dtype)
    expect(len(x.shape) == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    batch, _, columns = x.shape
    expect(columns > 0, "x", "columns", columns)
    for name, spec in inputs.items():
        shape = (batch, 1, columns) if name in OPERANDS else x.shape
        expect(spec.shape == shape, name, f"shape {list(shape)}", list(spec.shape))
        expect(spec.dtype == x.dtype, name, f"dtype {x.dtype}, as x", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
    expect(set(workload.scalars) == {"eps"}, "scalars", "eps", sorted(workload.scalars))
