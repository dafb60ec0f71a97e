"""Returns zeros.

Caught by: the tolerance.
"""

import torch


def axpy(x, y, *, factor):
    return torch.zeros_like(x)
