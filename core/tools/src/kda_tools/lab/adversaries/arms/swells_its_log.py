"""Makes the file that it prints to 4 TiB long, without a byte in it, and ends.

Caught by: its end, like any other; only the end of what it printed is read.
"""

import os


def axpy(x, y, *, factor):
    os.ftruncate(1, 4 << 40)
    os._exit(1)
