"""Dies of a signal, as after a stray pointer."""

import os
import signal


def axpy(x, y, *, factor):
    os.kill(os.getpid(), signal.SIGSEGV)
