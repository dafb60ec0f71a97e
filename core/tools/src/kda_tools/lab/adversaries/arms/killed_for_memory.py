"""Is killed without a word, as by the kernel when memory runs out.

Caught by: the judge reads the signal from the process's end.
"""

import os
import signal


def axpy(x, y, *, factor):
    os.kill(os.getpid(), signal.SIGKILL)
