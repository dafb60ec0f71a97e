"""Wrong behind the first 32768 elements, as if an index had overflowed.

Caught by: every element is compared. Rows of a CPU are shrunken: what overflows later shows on a GPU alone.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    out.view(-1)[1 << 15 :] = 0
    return out
