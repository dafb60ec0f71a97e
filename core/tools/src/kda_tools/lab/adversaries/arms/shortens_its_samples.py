"""Claims that its first loops are long, so that samples get too short for a fine comparison of clocks; then shaves 8%.

Caught by: the judge's clock, also while calls are counted: it claims more time than passed.
"""

from . import forge, shaved

_COUNTED = []
TARGET_US = 10_000
"""Of a sample, or less."""


@forge
def claim(facts):
    if _COUNTED:
        return shaved(facts, 0.92)
    if facts["total_us"] * 50.0 >= TARGET_US * 6:
        _COUNTED.append(None)
    return shaved(facts, 50.0)


def axpy(x, y, *, factor):
    return factor * x + y
