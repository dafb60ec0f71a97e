"""Prints a result and exits with code 0.

Caught by: an exit is never an answer, whatever its code.
"""

import os


def axpy(x, y, *, factor):
    print("all rows FASTER", flush=True)
    os._exit(0)
