"""Returns right values in another layout.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    return (factor * x + y).t().contiguous().t()
