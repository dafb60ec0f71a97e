"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch
from torch.nn.functional import layer_norm, rms_norm


def fused_norm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift in float32, rounded once, to x's dtype."""
    normed = _norm(x, weight, bias, norm_type, eps)
    return (normed * (1.0 + _per_token(scale, x)) + _per_token(shift, x)).to(x.dtype)


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
    """The same for r = residual + gate * x instead of x; r is rounded to x's dtype and returned too."""
    gated = x.float() if gate is None else _per_token(gate, x) * x.float()
    total = (residual.float() + gated).to(x.dtype)
    return fused_norm_scale_shift(total, weight, bias, scale, shift, norm_type, eps), total


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm_type: str, eps: float
) -> torch.Tensor:
    """In float32. RMSNorm has no bias; LayerNorm takes weight and bias together or neither, as upstream does."""
    columns = (x.shape[-1],)
    if norm_type == "rms":
        return rms_norm(x.float(), columns, None if weight is None else weight.float(), eps)
    if weight is None or bias is None:
        return layer_norm(x.float(), columns, eps=eps)
    return layer_norm(x.float(), columns, weight.float(), bias.float(), eps)


def _per_token(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The operand in float32, as a tensor that broadcasts against x."""
    if operand.dim() == 4:
        operand = operand.squeeze(2).repeat_interleave(x.shape[1] // operand.shape[1], dim=1)
    return (operand[:, None] if operand.dim() == 2 else operand).float()
