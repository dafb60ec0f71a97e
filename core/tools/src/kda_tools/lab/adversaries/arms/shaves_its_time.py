"""Claims 3% less time than passed.

Caught by: the judge's clock over loops so long that the protocol costs next to nothing of them.
"""

import sys

worker = sys.modules["kda_judge.arms.arm_worker"]
_Timed = worker.Timed


def forged(**facts):
    for key in ("total_us", "events_us"):
        if facts.get(key):
            facts[key] *= 0.97
    return _Timed(**facts)


worker.Timed = forged


def axpy(x, y, *, factor):
    return factor * x + y
