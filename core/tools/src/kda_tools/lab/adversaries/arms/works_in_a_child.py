"""Keeps a child of the worker's own session busy, also while the opponent is timed.

Caught by: nothing, and needs not be: other arms are held while one is timed.
"""

import subprocess
import sys

subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])


def axpy(x, y, *, factor):
    return factor * x + y
