"""The op in plain PyTorch, as a sampler would write it: the `eager` and `compile` arms."""

import torch


def softmax(logits: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """Logits in the dtype of the result, divided, and their softmax: three launches where logits have 16 bits."""
    if temperatures is not None:
        logits = logits.to(torch.result_type(logits, temperatures)) / temperatures
    return torch.softmax(logits, dim=-1)
