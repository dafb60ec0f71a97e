"""Returns more precision than asked for."""


def axpy(x, y, *, factor):
    return (factor * x + y).double()
