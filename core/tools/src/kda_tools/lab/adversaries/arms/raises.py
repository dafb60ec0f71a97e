"""Raises on every call.

Caught by: the judge names exception, file and line.
"""


def axpy(x, y, *, factor):
    raise RuntimeError("no such kernel image")
