"""Forgets to return.

Caught by: the check of the form.
"""


def axpy(x, y, *, factor):
    factor * x + y
