"""The good arm of the test task."""

import torch


def axpy(x, y, *, factor):
    return torch.add(y, x, alpha=factor).contiguous()


def axpy_(x, y, *, factor):
    x.copy_(torch.add(y, x, alpha=factor))


def squash(x, *, factor):
    return torch.tanh(x.float() * factor).to(x.dtype)


def launches(op, inputs, scalars):
    """No kernel of its own: there is nothing to compile."""
    return []
