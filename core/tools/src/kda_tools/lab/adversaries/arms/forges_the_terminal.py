"""Ends with words that clear a terminal and print a table of its own.

Caught by: its end, like any other; control characters are shown, not sent.
"""

import os
import sys


def axpy(x, y, *, factor):
    print("\x1b[2J\x1b[Hall rows \x1b[32mFASTER\x1b[0m [green]FASTER[/green] \x1b]0;owned\x07", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)
