"""Starts a process in a session of its own, which outlives the worker and could disturb whoever is timed next.

Caught by: nothing: the judge ends the worker's process group, and the child has left it.
"""

import subprocess

subprocess.Popen(["sleep", "3"], start_new_session=True)


def axpy(x, y, *, factor):
    return factor * x + y
