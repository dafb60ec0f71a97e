"""Arms that cheat or fail, and what several of them need."""

import os
from collections.abc import Iterator
from pathlib import Path


def others() -> Iterator[int]:
    """Ids of the other workers of this task folder, which their command line names, and of their supervisors."""
    task, mine = str(Path(__file__).parent.parent), (os.getpid(), os.getppid())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "kda_judge.arms.arm_worker" in command and task in command and int(folder.name) not in mine:
            yield int(folder.name)
