"""Returns a copy of its input.

Caught by: the tolerance.
"""


def axpy(x, y, *, factor):
    return x.clone()
