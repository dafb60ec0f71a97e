"""Writes a line without end on the judge's socket.

Caught by: the longest line that the judge accepts.
"""

import os
import sys

_CHANNEL = int(sys.argv[1])
"""The worker is started with its descriptor; on a GPU, CUDA's sockets lie beside it."""


def axpy(x, y, *, factor):
    while True:
        os.write(_CHANNEL, b" " * (1 << 20))
