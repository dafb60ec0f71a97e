"""Claims a third of the time.

Caught by: the judge's clock over long loops.
"""

from . import forge

forge(lambda facts: facts | {"total_us": facts["total_us"] / 3})


def axpy(x, y, *, factor):
    return factor * x + y
