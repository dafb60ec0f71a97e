"""Wrong in one element, by a little.

Caught by: every element is compared.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    out[-1, -1] += 0.01 * (1 + out[-1, -1].abs())
    return out
