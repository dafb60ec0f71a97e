"""Writes eight bytes before the beginning of its own output.

Caught by: guards around what a verified call allocates.
"""

import torch

from .out_of_bounds import wipe


def axpy(x, y, *, factor):
    _before, out = torch.empty_like(x), torch.empty_like(x)  # ahead of a segment's first block nothing may be mapped
    torch.add(y, x, alpha=factor, out=out)
    wipe(out.data_ptr() - 8, out.device)
    return out
