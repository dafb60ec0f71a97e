"""A division, then QuACK's softmax, 0.6.5; import after `kda_judge.arms.upstream.activate`."""

import torch
from quack.softmax import softmax_fwd

__all__ = ["softmax"]


def softmax(logits: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """Probabilities of every row, float32."""
    p: torch.Tensor = softmax_fwd(logits if temperatures is None else logits / temperatures)
    return p
