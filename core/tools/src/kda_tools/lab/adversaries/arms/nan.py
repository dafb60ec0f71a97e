"""One element is not a number.

Caught by: every element is compared.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    out[3, 5] = float("nan")
    return out
