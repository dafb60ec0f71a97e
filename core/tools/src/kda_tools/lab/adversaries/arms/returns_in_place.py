"""Works in place, but returns a tensor where upstream returns None.

Caught by: the check of the form.
"""


def axpy_(x, y, *, factor):
    return x.mul_(factor).add_(y)
