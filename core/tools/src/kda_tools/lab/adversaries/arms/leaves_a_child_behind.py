"""Starts a process in a session of its own, which could disturb whoever is timed next.

Caught by: the worker's process tree, of which no process may leave the session.
"""

import subprocess

subprocess.Popen(["sleep", "30"], start_new_session=True)


def axpy(x, y, *, factor):
    return factor * x + y
