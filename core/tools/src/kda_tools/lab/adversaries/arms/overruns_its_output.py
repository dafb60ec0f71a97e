"""Writes eight bytes past the end of its own output.

Caught by: guards around what a verified call allocates.
"""

import torch

from .out_of_bounds import wipe


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    torch.add(y, x, alpha=factor, out=out)
    wipe(out.data_ptr() + out.numel() * out.element_size(), out.device)
    return out
