"""Remembers by data pointer and version counter.

Caught by: the judge writes new values from its own process, where no counter of the worker moves.
"""

_SEEN = {}


def axpy(x, y, *, factor):
    key = (x.data_ptr(), x._version, y.data_ptr(), y._version)
    if key not in _SEEN:
        _SEEN[key] = factor * x + y
    return _SEEN[key].clone()
