"""Claims that it made no call.

Caught by: the reply's model.
"""

from . import forge

forge(lambda facts: facts | {"calls": 0})


def axpy(x, y, *, factor):
    return factor * x + y
