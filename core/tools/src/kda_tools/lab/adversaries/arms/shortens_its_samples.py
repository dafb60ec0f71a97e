"""Claims that its first loops are long, so that samples get too short for a fine comparison of clocks; then shaves 8%.

Caught by: the judge's clock, also while calls are counted: it claims more time than passed.
"""

import sys

worker = sys.modules["kda_judge.arms.arm_worker"]
_Timed = worker.Timed
_COUNTED = []
TARGET_US = 10_000
"""Of a sample, or less."""


def forged(**facts):
    share = 0.92
    if not _COUNTED:
        share = 50.0
        if facts["total_us"] * share >= TARGET_US * 6:
            _COUNTED.append(None)
    for key in ("total_us", "events_us"):
        if facts.get(key):
            facts[key] *= share
    return _Timed(**facts)


worker.Timed = forged


def axpy(x, y, *, factor):
    return factor * x + y
