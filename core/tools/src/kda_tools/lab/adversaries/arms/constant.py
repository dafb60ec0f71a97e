"""Returns a constant that fits a loose tolerance.

Caught by: the bound of twice the opponent's error.
"""

import torch


def squash(x, *, factor):
    return torch.zeros_like(x)
