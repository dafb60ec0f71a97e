"""Replaces the worker's own clock with one that runs at half speed.

Caught by: the judge's clock over long loops.
"""

from kda_judge.arms import clocks

_clock = clocks._clock
clocks._clock = lambda: _clock() // 2


def axpy(x, y, *, factor):
    return factor * x + y
