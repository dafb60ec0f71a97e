"""What PyTorch runs for the statements of the VAE of both pinned releases, if a clip is in channels-last order.

They are in `HunyuanVideoResnetBlockCausal3D`, `HunyuanVideoCausalConv3d` and `HunyuanVideoUpsampleCausal3D` of SGLang's
hunyuanvae.py, 0.5.12.post1 and 0.5.23. Those models keep [B, C, T, H, W], for which SGLang has a fused norm and SiLU
(task k07). In channels-last order no release has a function. PyTorch's norm and padding make tensors of
[B, C, T, H, W], so the last step is a copy.
"""

import torch
from torch.nn.functional import group_norm, interpolate, pad, silu

__all__ = ["bias_residual", "group_norm_silu_pad", "upsample_pad"]


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
    """The convolution's bias, norm, SiLU, padding, one after the other."""
    x = x if x_bias is None else x + x_bias
    y = silu(group_norm(x.movedim(4, 1), num_groups, weight, bias, eps))
    return _padded(y, frames, height, width)


def upsample_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """The first frame and the others upsampled, one behind the other, with their edges repeated."""
    first, others = source.movedim(4, 1).split((1, source.shape[1] - 1), dim=2)
    x = interpolate(first.squeeze(2), scale_factor=(up_space, up_space), mode="nearest").unsqueeze(2)
    if others.shape[2]:
        scale = (up_frames, up_space, up_space)
        x = torch.cat((x, interpolate(others.contiguous(), scale_factor=scale, mode="nearest")), dim=2)
    return _padded(x, frames, height, width)


def _padded(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """Replicate padding of [B, C, T, H, W]; returns [B, T, H, W, C]."""
    return pad(x, (width, width, height, height, frames, 0), mode="replicate").movedim(1, 4).contiguous()


def bias_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, residual_bias: torch.Tensor | None
) -> torch.Tensor:
    """Each convolution's bias in a kernel of its own, then the residual."""
    y = x + bias
    if residual is None:
        return y
    return y + (residual if residual_bias is None else residual + residual_bias)
