"""The plain arm of the test task."""


def axpy(x, y, *, factor):
    return factor * x + y


def axpy_(x, y, *, factor):
    x.mul_(factor).add_(y)
