"""Returns a tensor without memory.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    return (factor * x + y).to("meta")
