"""Is slow while the judge finds out how many calls a sample needs, so that one is enough; then claims a third less.

Caught by: the judge's clock over longer loops, which decide when samples are too short for it.
"""

import sys
import time

from . import forge, shaved

_ROWS = []
forge(lambda facts: shaved(facts, 2 / 3))


def axpy(x, y, *, factor):
    loop = sys._getframe(1)
    if loop.f_code.co_name == "wall":
        row = loop.f_back.f_locals["row"]
        if not any(known is row for known in _ROWS):
            _ROWS.append(row)
            time.sleep(0.06)
    return factor * x + y
