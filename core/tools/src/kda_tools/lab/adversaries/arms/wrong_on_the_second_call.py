"""Right on the first call and wrong on the second.

Caught by: every draw is a call of its own.
"""

_CALLS = []


def axpy(x, y, *, factor):
    _CALLS.append(None)
    return factor * x + (y if len(_CALLS) != 2 else 0)
