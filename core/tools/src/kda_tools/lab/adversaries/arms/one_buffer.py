"""Returns the same memory from every call.

Caught by: outputs of two single calls must not overlap.
"""

import torch

_OUT = {}


def axpy(x, y, *, factor):
    out = _OUT.setdefault(x.shape, torch.empty_like(x))
    return torch.add(y, x, alpha=factor, out=out)
