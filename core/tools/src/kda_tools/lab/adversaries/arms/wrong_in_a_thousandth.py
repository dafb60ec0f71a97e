"""Wrong in every thousandth element, by 1%.

Caught by: every element is compared, none is sampled.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    out.view(-1)[::1000] *= 1.01
    return out
