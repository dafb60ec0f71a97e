"""Claims more calls than it was asked for, by which its time is divided.

Caught by: the judge knows what it asked for.
"""

import sys

worker = sys.modules["kda_judge.arms.arm_worker"]
_Timed = worker.Timed


def forged(**facts):
    facts["calls"] *= 7
    return _Timed(**facts)


worker.Timed = forged


def axpy(x, y, *, factor):
    return factor * x + y
