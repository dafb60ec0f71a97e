"""Gives the opponent's process the lowest priority.

Caught by: the opponent's priority, which must stay the judge's.
"""

import os
from pathlib import Path


def others():
    """Ids of the other workers of this task folder, which their command line names."""
    task, mine = str(Path(__file__).parent.parent), (os.getpid(), os.getppid())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "kda_judge.arms.arm_worker" in command and task in command and int(folder.name) not in mine:
            yield int(folder.name)


def axpy(x, y, *, factor):
    for process in others():
        os.setpriority(os.PRIO_PROCESS, process, 19)
    return factor * x + y
