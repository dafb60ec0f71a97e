"""Asks for more memory than there is.

Caught by: the judge names the exception; the worker's end frees what it held.
"""

import torch


def axpy(x, y, *, factor):
    torch.empty(1 << 60, dtype=torch.uint8, device=x.device)
    return factor * x + y
