"""Dies of a signal, as after a stray pointer.

Caught by: the judge reads the signal from the process's end.
"""

import ctypes
import os
import signal

PR_SET_DUMPABLE = 4
"""From linux/prctl.h; 0: no core dump, neither to a file nor to a program. A CUDA process maps many GB."""


def axpy(x, y, *, factor):
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    os.kill(os.getpid(), signal.SIGSEGV)
