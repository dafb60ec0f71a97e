"""Returns one tensor too many.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    return factor * x + y, y.clone()
