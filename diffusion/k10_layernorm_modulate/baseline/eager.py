"""The op in plain PyTorch, as FLUX computes it where its fused kernel is off: the `eager` and `compile` arms."""

import torch


def fused_layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm of x without weights, times 1 + scale, plus shift, rounded after each of them."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None])
    return y if shift is None else y + shift[:, None]
