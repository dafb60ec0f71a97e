"""Returns its input.

Caught by: no output may lie in the arena.
"""


def axpy(x, y, *, factor):
    return x
