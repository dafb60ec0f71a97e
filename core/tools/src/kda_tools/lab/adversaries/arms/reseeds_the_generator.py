"""Seeds every generator of random numbers in its process.

Caught by: nothing, and needs not be: draws are made in the judge's process.
"""

import random

import torch


def axpy(x, y, *, factor):
    random.seed(0)
    torch.manual_seed(0)
    return factor * x + y
