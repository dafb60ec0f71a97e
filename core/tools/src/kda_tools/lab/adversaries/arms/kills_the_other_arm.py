"""Kills the opponent's process.

Caught by: the judge needs both: the row fails, with the signal that ended the opponent.
"""

import os
import signal

from . import others


def axpy(x, y, *, factor):
    for process in others():
        os.kill(process, signal.SIGKILL)
    return factor * x + y
