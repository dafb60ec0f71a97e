"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch


def rounded_rmsnorm_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x without weights, times 1 + scale, plus shift; each operator rounds to x's dtype."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def rounded_residual_rmsnorm_modulate(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of h = residual + x * gate; h as well. Without gate x alone is added, without scale nothing follows."""
    h = residual + (x if gate is None else x * gate)
    y = torch.nn.functional.rms_norm(h, h.shape[-1:], eps=eps)
    if scale is not None and shift is not None:
        y = y * (1 + scale) + shift
    return y, h


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
    """The same with two modulations of one norm."""
    n, h = rounded_residual_rmsnorm_modulate(residual, x, gate, None, None, eps)
    return n * (1 + scale) + shift, n * (1 + other_scale) + other_shift, h
