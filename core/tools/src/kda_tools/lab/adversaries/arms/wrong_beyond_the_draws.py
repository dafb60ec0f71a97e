"""Wrong where an input is exactly zero, or larger than 1000.

Caught by: the zeros among the draws of mixed magnitudes. Large values alone would not be.
"""

import torch


def axpy(x, y, *, factor):
    return torch.where((x == 0) | (x.abs() > 1000), 1e9, factor * x + y)
