"""Writes eight bytes before the beginning of its own output.

Caught by: guards around what a verified call allocates.
"""

import torch

from .out_of_bounds import wipe


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    torch.add(y, x, alpha=factor, out=out)
    wipe(out.data_ptr() - 8, out.device)
    return out
