"""Starts a daemon as daemons start, by two forks: its parent is gone, and its session is its own.

Caught by: the worker's supervisor, to which the daemon falls as an orphan; it ends with the worker.
"""

import os

running, ends_with_exec = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "30")
    os._exit(0)
os.close(ends_with_exec)
os.read(running, 1)  # until `sleep` runs, so that the judge sees it by that name


def axpy(x, y, *, factor):
    return factor * x + y
