"""The float64 oracles and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

DTYPES = ("float16", "bfloat16", "float32")
NORMS = ("layer", "rms")
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""Upstream's number of columns is a multiple of the first and at most the second."""
OPERANDS = ("scale", "shift", "scale2")
VECTORS = ("weight", "bias", "weight2", "bias2")


def fused_norm_tanh_mul_add(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor]:
    """What y shall be: norm(x) * tanh(scale) + shift, [B, S, D] float64."""
    normed = _norm(x.double(), weight, bias, norm_type, eps)
    return (normed * torch.tanh(_per_token(scale, x)) + _per_token(shift, x),)


def fused_norm_tanh_mul_add_norm_scale(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight2: torch.Tensor | None,
    bias2: torch.Tensor | None,
    scale2: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same y, and y2 = norm(y) * (1 + scale2), [B, S, D] float64 each.

    y2 is computed from y as it is returned, rounded to x's dtype. Only this rounding is part of the contract.
    """
    (y,) = fused_norm_tanh_mul_add(x, weight, bias, scale, shift, norm_type, eps)
    normed = _norm(y.to(x.dtype).double(), weight2, bias2, norm_type, eps)
    return y, normed * (1 + _per_token(scale2, x))


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    double = workload.op == "fused_norm_tanh_mul_add_norm_scale"
    needed = {"x", *OPERANDS[: 2 + double]}
    allowed = needed | set(VECTORS[: 2 + 2 * double])
    expect(needed <= set(inputs) <= allowed, "inputs", f"{sorted(needed)} of {sorted(allowed)}", sorted(inputs))
    x = inputs["x"]
    expect(len(x.shape) == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    columns = x.shape[2]
    fits = columns % COLUMNS_STEP == 0 and 0 < columns <= MAX_COLUMNS
    expect(fits, "x", f"D a multiple of {COLUMNS_STEP} up to {MAX_COLUMNS}", columns)
    for name, spec in inputs.items():
        expect(spec.dtype in DTYPES, name, f"dtype {', '.join(DTYPES)}", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
        if name in VECTORS:
            expect(spec.shape == (columns,), name, f"shape {[columns]}", list(spec.shape))
        elif name in OPERANDS:
            _check_operand(name, spec.shape, x.shape)
    expect({"norm_type"} <= set(scalars) <= {"norm_type", "eps"}, "scalars", "norm_type and eps", sorted(scalars))
    expect(scalars["norm_type"] in NORMS, "norm_type", " or ".join(NORMS), scalars["norm_type"])


def _check_operand(name: str, shape: tuple[int, ...], x: tuple[int, ...]) -> None:
    """The forms of the solution; upstream takes those of three dimensions alone."""
    batch, tokens, columns = x
    if len(shape) == 4 and (shape[1] == 0 or tokens % shape[1]):
        raise ValueError(f"{name}: expected frames that divide the {tokens} tokens of x, got {shape[1]}")
    allowed = {
        1: [(1,), (columns,)],
        2: [(b, columns) for b in (1, batch)],
        4: [(batch, *shape[1:2], 1, columns)],
    }.get(len(shape), [(b, s, columns) for b in (1, batch) for s in (1, tokens)])
    if shape not in allowed:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(s)) for s in allowed)}, got {list(shape)}")


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm_type: str, eps: float
) -> torch.Tensor:
    """[B, S, D] float64. Upstream's RMSNorm leaves out the bias; its LayerNorm takes weight and bias only together."""
    layer = norm_type == "layer"
    wide = x - x.mean(dim=-1, keepdim=True) if layer else x
    normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is None or (layer and bias is None):
        return normed
    normed *= weight.double()
    return normed + bias.double() if layer and bias is not None else normed


def _per_token(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The operand in float64, in a form that broadcasts against x."""
    wide = operand.double()
    if wide.dim() == 4:  # [B, F, 1, D]: frame f is the tokens f * S/F to (f + 1) * S/F - 1
        tokens = torch.arange(x.shape[1], device=x.device)
        return wide[:, tokens * wide.shape[1] // x.shape[1], 0]
    return wide.unsqueeze(1) if wide.dim() == 2 else wide
