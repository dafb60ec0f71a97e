"""Right result, but scribbles on an input.

Caught by: inputs are compared bit by bit after the call.
"""


def axpy(x, y, *, factor):
    out = factor * x + y
    y[0, 0] += 1
    return out
