"""Wrong in the rows behind the last full block of four.

Caught by: every element is compared, and shrunken rows keep their remainder modulo 8.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    out[len(x) // 4 * 4 :] = 0
    return out
