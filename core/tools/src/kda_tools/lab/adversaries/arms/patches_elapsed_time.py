"""Patches the method of `torch.cuda.Event`, so that the worker's own class halves what it measures.

Caught by: the host's clock around the same replays.
"""

import torch

_elapsed_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda begin, end: _elapsed_time(begin, end) / 2


def axpy(x, y, *, factor):
    return factor * x + y
