"""Claims a third of the time.

Caught by: the judge's clock over long loops.
"""

import sys

worker = sys.modules["kda_judge.arms.arm_worker"]
_Timed = worker.Timed


def forged(**facts):
    facts["total_us"] /= 3
    return _Timed(**facts)


worker.Timed = forged


def axpy(x, y, *, factor):
    return factor * x + y
