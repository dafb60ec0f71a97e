"""Allocates once and returns the same memory from every call."""

import torch

_OUT = {}


def axpy(x, y, *, factor):
    out = _OUT.setdefault(x.shape, torch.empty_like(x))
    return torch.add(y, x, alpha=factor, out=out)
