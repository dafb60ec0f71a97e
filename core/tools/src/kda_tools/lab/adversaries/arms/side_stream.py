"""Works on a stream of its own and returns at once.

Caught by: events on the caller's stream: they see less time than the host does.
"""

import torch

_STREAM = []


def axpy(x, y, *, factor):
    if not _STREAM:
        _STREAM.append(torch.cuda.Stream())
    with torch.cuda.stream(_STREAM[0]):
        return factor * x + y
