"""Remembers by data pointer.

Caught by: the judge writes new values into the same buffers.
"""

_SEEN = {}


def axpy(x, y, *, factor):
    key = (x.data_ptr(), y.data_ptr())
    if key not in _SEEN:
        _SEEN[key] = factor * x + y
    return _SEEN[key].clone()
