"""As `remembers_by_content`, but returns a copy, so that every result has memory of its own.

Caught by: inputs of which a stretch changes while a loop runs, and not the elements that are compared. A captured call
is honest here, because the graph's first replay would show a remembered one.
"""

import torch

_LAST = {}


def axpy(x, y, *, factor):
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return factor * x + y
    key = (x[0, :4].tolist(), y[0, :4].tolist())
    if _LAST.get("key") != key:
        _LAST.update(key=key, out=factor * x + y)
    return _LAST["out"].clone()
