"""Keeps a processor busy in a chain of children: each works for some milliseconds, starts the next one, and ends.

Caught by: nothing, and needs not be: other arms are held while one is timed.
"""

import os
import time

_CHAIN = []


def chain():
    while True:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        if os.fork():
            os._exit(0)


def axpy(x, y, *, factor):
    if not _CHAIN:
        _CHAIN.append(os.fork())
        if _CHAIN == [0]:
            chain()
    return factor * x + y
