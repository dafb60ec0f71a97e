"""Replaces `torch.cuda.synchronize` with a function that waits for nothing.

Caught by: nothing, and needs not be: the worker took it before the arm was imported.
"""

import torch

torch.cuda.synchronize = lambda *_: None


def axpy(x, y, *, factor):
    return factor * x + y
