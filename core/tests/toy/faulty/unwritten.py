"""Leaves the last rows of its output as the allocator gave them."""

import torch


def axpy(x, y, *, factor):
    out = torch.empty_like(x)
    out[:-3] = factor * x[:-3] + y[:-3]
    return out
