"""Replaces `torch.cuda.Event` with one that measures next to nothing.

Caught by: nothing, and needs not be: the worker took the class before the arm was imported.
"""

import torch


class Event:
    """Always a nanosecond."""

    def __init__(self, **_):
        pass

    def record(self, *_):
        pass

    def elapsed_time(self, other):
        return 1e-6


torch.cuda.Event = Event


def axpy(x, y, *, factor):
    return factor * x + y
