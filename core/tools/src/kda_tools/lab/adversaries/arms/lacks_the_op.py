"""Exports another function.

Caught by: the worker looks the op up when the row opens.
"""


def saxpy(x, y, *, factor):
    return x
