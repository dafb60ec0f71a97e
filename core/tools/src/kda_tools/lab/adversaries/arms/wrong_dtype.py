"""Returns more precision than asked for.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    return (factor * x + y).double()
