"""Returns its input."""


def axpy(x, y, *, factor):
    return x
