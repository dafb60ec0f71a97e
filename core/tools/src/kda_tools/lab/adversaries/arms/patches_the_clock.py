"""Replaces the clocks of `time` with one that stands still.

Caught by: nothing, and needs not be: the worker took its clock before the arm was imported.
"""

import time

time.perf_counter = time.monotonic = time.time = lambda: 0.0
time.perf_counter_ns = time.monotonic_ns = time.time_ns = lambda: 0


def axpy(x, y, *, factor):
    return factor * x + y
