"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch
from torch.nn.functional import layer_norm


def temb_norm_scale_shift(
    x: torch.Tensor, temb: torch.Tensor, table: torch.Tensor, shift: int = 0, scale: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift in float32, rounded once, to x's dtype."""
    return _modulated(x, table, temb, None, None, shift, scale, eps)


def temb_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    temb: torch.Tensor,
    gate_table: torch.Tensor | None,
    table: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: int = 2,
    shift: int = 0,
    scale: int = 1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for r = residual + gate * x instead of x; r is rounded to x's dtype and returned too."""
    if gate_table is None:
        r = (residual.float() + x.float()).to(x.dtype)
    else:
        r = temb_residual(residual, x, temb, gate_table, gate)
    return _modulated(r, table, temb, weight, bias, shift, scale, eps), r


def temb_residual(
    residual: torch.Tensor, x: torch.Tensor, temb: torch.Tensor, gate_table: torch.Tensor, gate: int = 2
) -> torch.Tensor:
    """Residual + gate * x in float32, rounded once, to x's dtype."""
    return (residual.float() + _slice(gate_table, temb, gate) * x.float()).to(x.dtype)


def _modulated(
    x: torch.Tensor,
    table: torch.Tensor | None,
    temb: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shift: int,
    scale: int,
    eps: float,
) -> torch.Tensor:
    """LayerNorm takes weight and bias together or neither, as upstream does."""
    both = weight is not None and bias is not None
    parameters = (weight.float(), bias.float()) if both else (None, None)
    y = layer_norm(x.float(), x.shape[-1:], *parameters, eps)
    if table is not None:
        y = y * (1.0 + _slice(table, temb, scale)) + _slice(table, temb, shift)
    return y.to(x.dtype)


def _slice(table: torch.Tensor, temb: torch.Tensor, number: int) -> torch.Tensor:
    """Slice `number` of table + temb, float32, in a form that broadcasts against x."""
    part = table[:, number].float() + temb[..., number, :].float()
    return part if temb.dim() == 4 else part.unsqueeze(1)
