"""Keeps a thread busy on the core that timing is pinned to, except while its own calls run.

Caught by: nothing, and needs not be: other arms are held while one is timed.
"""

import os
import threading
import time

import torch

IDLE_S = 2e-3
_LAST = {"time": 0.0}


def disturb():
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    load = torch.ones(64, 64)
    while True:
        if time.perf_counter() - _LAST["time"] < IDLE_S:
            time.sleep(IDLE_S)
        else:
            load @ load


threading.Thread(target=disturb, daemon=True).start()


def axpy(x, y, *, factor):
    _LAST["time"] = time.perf_counter()
    return factor * x + y
