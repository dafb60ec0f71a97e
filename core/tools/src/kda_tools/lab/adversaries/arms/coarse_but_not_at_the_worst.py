"""Rounds to steps as wide as those of the largest output: no element is further off than twice the baseline's worst.

Caught by: the error of all elements together, beside the baseline's.
"""

import torch


def squash(x, *, factor):
    out = torch.tanh(x.float() * factor)
    step = 2.0 ** (torch.floor(torch.log2(out.abs().max())) - 7)
    return (torch.round(out / step) * step).to(x.dtype)


def axpy(x, y, *, factor):
    out = x.float() * factor + y.float()
    step = 2.0 ** (torch.floor(torch.log2(out.abs().max())) - 8)
    return (torch.round(out / step) * step).to(x.dtype)
