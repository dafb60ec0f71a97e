"""Liger-Kernel's SwiGLU, 0.8.5, on two halves of one tensor; import after `upstream.activate`.

The function takes contiguous tensors, so its decorator copies both halves first.
"""

import torch
from liger_kernel.ops.swiglu import LigerSiLUMulFunction

__all__ = ["silu_and_mul"]


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """SiLU of the first half of every row, rounded, times the second half."""
    y: torch.Tensor = LigerSiLUMulFunction.apply(*input.chunk(2, dim=-1))
    return y if out is None else out.copy_(y)
