"""Claims that it made no call.

Caught by: the reply's model.
"""

import sys

worker = sys.modules["kda_judge.arms.arm_worker"]
_Timed = worker.Timed


def forged(**facts):
    facts["calls"] = 0
    return _Timed.model_construct(**facts)  # the model's own checks are the judge's to make


worker.Timed = forged


def axpy(x, y, *, factor):
    return factor * x + y
