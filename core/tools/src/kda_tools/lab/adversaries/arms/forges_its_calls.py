"""Claims more calls than it was asked for, by which its time is divided.

Caught by: the judge knows what it asked for.
"""

from . import forge

forge(lambda facts: facts | {"calls": facts["calls"] * 7})


def axpy(x, y, *, factor):
    return factor * x + y
