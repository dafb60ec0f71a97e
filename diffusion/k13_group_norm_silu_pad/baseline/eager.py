"""The ops in plain PyTorch, norm and SiLU in float32, padding by an index for each dimension: `eager` and `compile`."""

import torch
from torch.nn.functional import group_norm, silu


def group_norm_silu_pad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_groups: int,
    eps: float,
    frames: int,
    height: int,
    width: int,
) -> torch.Tensor:
    """GroupNorm and SiLU in float32, rounded once to x's dtype, and the edges repeated."""
    y = silu(group_norm(x.movedim(4, 1).float(), num_groups, weight.float(), bias.float(), eps)).to(x.dtype)
    return upsample_pad(y.movedim(1, 4), 1, 1, frames, height, width).contiguous()


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
