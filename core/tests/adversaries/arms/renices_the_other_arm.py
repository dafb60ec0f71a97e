"""Gives the opponent's process the lowest priority.

Caught by: the opponent's priority, which must stay the judge's.
"""

import os
from pathlib import Path


def others():
    """Ids of this task's other workers."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        mine = "kda_core.worker" in command and __name__.rpartition(".faulty")[0] in command
        if mine and int(folder.name) != os.getpid():
            yield int(folder.name)


def axpy(x, y, *, factor):
    for process in others():
        os.setpriority(os.PRIO_PROCESS, process, 19)
    return factor * x + y
