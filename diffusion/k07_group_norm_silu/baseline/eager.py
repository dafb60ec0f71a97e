"""The op in plain PyTorch, as a model's authors would write it: the `eager` and `compile` arms."""

import torch
from torch import nn
from torch.nn.functional import group_norm, silu


def triton_group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float = 1e-5
) -> torch.Tensor:
    """GroupNorm and SiLU in float32; rounded once, to x's dtype."""
    return silu(group_norm(x.contiguous().float(), num_groups, weight.float(), bias.float(), eps)).to(x.dtype)


def apply_group_norm_silu(x: torch.Tensor, norm: nn.Module, activation: nn.Module) -> torch.Tensor:
    """The two modules, one after the other."""
    return activation(norm(x))
