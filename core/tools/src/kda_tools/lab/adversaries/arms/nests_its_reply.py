"""Answers for the worker with brackets in brackets, deeper than a parser of JSON goes.

Caught by: the form of a reply.
"""

import os
import sys


def axpy(x, y, *, factor):
    os.write(int(sys.argv[1]), b"[" * 100_000 + b"\n")
    return factor * x + y
