"""The ops in plain PyTorch, by an index for each dimension: the `eager` and `compile` arms."""

import torch


def causal_pad(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """The clip with its edges repeated."""
    return upsample_causal_pad(x, 1, 1, frames, height, width)


def upsample_causal_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """The clip, upsampled, with its edges repeated."""
    _, _, t, h, w = source.shape
    times = torch.arange(-frames, (t - 1) * up_frames + 1, device=source.device).clamp(min=0)
    lines, columns = (
        torch.arange(-margin, size * up_space + margin, device=source.device).clamp(0, size * up_space - 1) // up_space
        for margin, size in ((height, h), (width, w))
    )
    return source[:, :, ((times + up_frames - 1) // up_frames)[:, None, None], lines[:, None], columns]
