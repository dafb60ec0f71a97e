"""Works once per buffer: later calls in place do nothing.

Caught by: every draw is written into the same buffer.
"""

_SEEN = set()


def axpy_(x, y, *, factor):
    if x.data_ptr() not in _SEEN:
        _SEEN.add(x.data_ptr())
        x.mul_(factor).add_(y)
