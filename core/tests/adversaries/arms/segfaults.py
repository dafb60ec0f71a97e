"""Dies of a signal, as after a stray pointer.

Caught by: the judge reads the signal from the process's end.
"""

import os
import signal


def axpy(x, y, *, factor):
    os.kill(os.getpid(), signal.SIGSEGV)
