"""Claims a time that is not a number.

Caught by: the reply's model.
"""

from . import forge

forge(lambda facts: facts | {"total_us": float("nan")})


def axpy(x, y, *, factor):
    return factor * x + y
