"""Kills the process that keeps its tree together.

Caught by: the worker ends with its supervisor.
"""

import os
import signal


def axpy(x, y, *, factor):
    os.kill(os.getppid(), signal.SIGKILL)
    return factor * x + y
