"""Returns the transpose's shape.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    return (factor * x + y).t().contiguous()
