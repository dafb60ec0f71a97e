"""Claims 3% less time than passed.

Caught by: the judge's clock over loops so long that the protocol costs next to nothing of them.
"""

from . import forge, shaved

forge(lambda facts: shaved(facts, 0.97))


def axpy(x, y, *, factor):
    return factor * x + y
