"""Leaves the last rows of its output as the allocator gave them.

Caught by: freed memory is filled with NaN before a single call.
"""

import torch


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    out[:-3] = factor * x[:-3] + y[:-3]
    return out
