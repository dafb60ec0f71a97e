"""Returns something that is no tensor."""


def axpy(x, y, *, factor):
    return 3.5
