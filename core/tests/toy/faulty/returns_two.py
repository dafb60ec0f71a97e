"""Returns one tensor too many."""


def axpy(x, y, *, factor):
    return factor * x + y, y.clone()
