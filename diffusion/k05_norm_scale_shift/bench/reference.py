"""The float64 oracles and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once.

They work in place on their own float64 tensors: of the largest rows one such tensor takes 7 GB.
"""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

DTYPES = ("float16", "bfloat16", "float32")
NORMS = ("layer", "rms")
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""Upstream's number of columns is a multiple of the first and at most the second."""
OPERANDS = ("gate", "scale", "shift")
VECTORS = ("weight", "bias")


def fused_norm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor]:
    """What y shall be: norm(x) * (1 + scale) + shift, [B, S, D] float64."""
    normed = _norm(x.to(torch.float64, copy=True), weight, bias, norm_type, eps)
    return (normed.mul_(1 + _per_token(scale, x)).add_(_per_token(shift, x)),)


def fused_scale_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y of r, and r = residual + gate * x itself, [B, S, D] float64 each.

    y is computed from r as it is returned, rounded to x's dtype. That rounding is part of the contract, because it
    decides y where r has a large offset: at 4160 two neighbours in bfloat16 are 32 apart. r is one multiply-add that is
    rounded to float32 first, as in upstream's compiled kernel; float64 holds the product of two inputs exactly.
    """
    total = x.to(torch.float64, copy=True)
    if gate is not None:
        total *= _per_token(gate, x)
    total += residual
    (y,) = fused_norm_scale_shift(total.float().to(x.dtype), weight, bias, scale, shift, norm_type, eps)
    return y, total


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    sums = workload.op == "fused_scale_residual_norm_scale_shift"
    needed = {"x", "scale", "shift"} | ({"residual"} if sums else set())
    allowed = needed | set(VECTORS) | ({"gate"} if sums else set())
    expect(needed <= set(inputs) <= allowed, "inputs", f"{sorted(needed)} of {sorted(allowed)}", sorted(inputs))
    x = inputs["x"]
    expect(len(x.shape) == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    columns = x.shape[2]
    fits = columns % COLUMNS_STEP == 0 and 0 < columns <= MAX_COLUMNS
    expect(fits, "x", f"D a multiple of {COLUMNS_STEP} up to {MAX_COLUMNS}", columns)
    for name, spec in inputs.items():
        expect(spec.dtype in DTYPES, name, f"dtype {', '.join(DTYPES)}", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
        if name in OPERANDS:
            _check_operand(name, spec.shape, x.shape)
        else:
            shape = (columns,) if name in VECTORS else x.shape
            expect(spec.shape == shape, name, f"shape {list(shape)}", list(spec.shape))
    expect({"norm_type"} <= set(scalars) <= {"norm_type", "eps"}, "scalars", "norm_type and eps", sorted(scalars))
    expect(scalars["norm_type"] in NORMS, "norm_type", " or ".join(NORMS), scalars["norm_type"])


def _check_operand(name: str, shape: tuple[int, ...], x: tuple[int, ...]) -> None:
    """The forms that upstream takes too; the solution takes more (docs/dispatch.md)."""
    batch, tokens, columns = x
    if len(shape) == 4 and (shape[1] == 0 or tokens % shape[1]):
        raise ValueError(f"{name}: expected frames that divide the {tokens} tokens of x, got {shape[1]}")
    allowed = {
        1: [(1,), (columns,)],
        2: [(b, columns) for b in (1, batch)],
        3: [(b, s, columns) for b in (1, batch) for s in (1, tokens)],
        4: [(batch, *shape[1:2], 1, columns)],
    }.get(len(shape), [(columns,)])
    if shape not in allowed:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(s)) for s in allowed)}, got {list(shape)}")


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm_type: str, eps: float
) -> torch.Tensor:
    """[B, S, D] float64, in place of x. Upstream's RMSNorm leaves out the bias; its LayerNorm takes both or none."""
    layer = norm_type == "layer"
    if layer:
        x -= x.mean(dim=-1, keepdim=True)
    x /= torch.sqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
    if weight is None or (layer and bias is None):
        return x
    x *= weight.double()
    if layer and bias is not None:
        x += bias.double()
    return x


def _per_token(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The operand in float64, in a form that broadcasts against x."""
    wide = operand.double()
    if wide.dim() == 4:  # [B, F, 1, D]: frame f is the tokens f * S/F to (f + 1) * S/F - 1
        tokens = torch.arange(x.shape[1], device=x.device)
        return wide[:, tokens * wide.shape[1] // x.shape[1], 0]
    return wide.unsqueeze(1) if wide.dim() == 2 else wide
