"""Starts a daemon as daemons start, by two forks: its parent is gone, and its session is its own.

Caught by: the worker's supervisor, to which the daemon falls as an orphan; it ends with the worker.
"""

import os

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "30")
    os._exit(0)


def axpy(x, y, *, factor):
    return factor * x + y
