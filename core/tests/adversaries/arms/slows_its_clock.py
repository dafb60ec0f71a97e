"""Replaces the worker's own clock with one that runs at half speed.

Caught by: the judge's clock.
"""

from kda_core import timing

_clock = timing._clock
timing._clock = lambda: _clock() // 2


def axpy(x, y, *, factor):
    return factor * x + y
