"""The ops in plain PyTorch, maths in float32, padding by an index for each dimension: the arm `eager`."""

import torch
from torch.nn.functional import silu


def group_norm_silu_pad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    x_bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    frames: int,
    height: int,
    width: int,
) -> torch.Tensor:
    """GroupNorm and SiLU in float32, rounded once to x's dtype, and the edges repeated."""
    v = x.float() if x_bias is None else x.float() + x_bias.float()
    v = v.flatten(1, 3).unflatten(2, (num_groups, -1))  # [B, pixels, groups, channels of a group]
    v = v - v.mean(dim=(1, 3), keepdim=True)
    v = v * torch.rsqrt(v.square().mean(dim=(1, 3), keepdim=True) + eps)
    y = silu(v.reshape(x.shape) * weight.float() + bias.float()).to(x.dtype)
    return upsample_pad(y, 1, 1, frames, height, width)


def upsample_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """The clip, upsampled, with its edges repeated."""
    _, t, h, w, _ = source.shape
    times = torch.arange(-frames, (t - 1) * up_frames + 1, device=source.device).clamp(min=0)
    lines, columns = (
        torch.arange(-margin, size * up_space + margin, device=source.device).clamp(0, size * up_space - 1) // up_space
        for margin, size in ((height, h), (width, w))
    )
    return source[:, ((times + up_frames - 1) // up_frames)[:, None, None], lines[:, None], columns]


def bias_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, residual_bias: torch.Tensor | None
) -> torch.Tensor:
    """The sum in float32, rounded once to x's dtype."""
    y = x.float() + bias.float()
    if residual is not None:
        y = y + (residual.float() if residual_bias is None else residual.float() + residual_bias.float())
    return y.to(x.dtype)
