"""What the VAE of both pinned releases runs: PyTorch's replicate padding, and its nearest upsampling.

It stands in `HunyuanVideoCausalConv3d` and `HunyuanVideoUpsampleCausal3D` of SGLang's hunyuanvae.py, 0.5.12.post1 and
0.5.23. The first frame is upsampled apart from the others, since it is not repeated. There is nothing of SGLang's to
import: `tests/test_upstream.py` runs the classes of the pinned files and compares.
"""

import torch
from torch.nn.functional import interpolate, pad

__all__ = ["causal_pad", "upsample_causal_pad"]


def causal_pad(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """The clip with its edges repeated."""
    return pad(x, (width, width, height, height, frames, 0), mode="replicate")


def upsample_causal_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """The clip, upsampled, with its edges repeated."""
    first, others = source.split((1, source.shape[2] - 1), dim=2)
    x = interpolate(first.squeeze(2), scale_factor=(up_space, up_space), mode="nearest").unsqueeze(2)
    if others.shape[2]:
        scale = (up_frames, up_space, up_space)
        x = torch.cat((x, interpolate(others.contiguous(), scale_factor=scale, mode="nearest")), dim=2)
    return causal_pad(x, frames, height, width)
