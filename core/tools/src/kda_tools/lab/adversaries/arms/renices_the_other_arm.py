"""Gives the opponent's process the lowest priority.

Caught by: the opponent's priority, which must stay the judge's.
"""

import os

from . import others


def axpy(x, y, *, factor):
    for process in others():
        os.setpriority(os.PRIO_PROCESS, process, 19)
    return factor * x + y
