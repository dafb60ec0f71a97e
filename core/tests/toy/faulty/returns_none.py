"""Forgets to return."""


def axpy(x, y, *, factor):
    factor * x + y
