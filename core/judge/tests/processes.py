"""Other processes, for tests that wait for them."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kda_judge.contract.tasks import Task


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait for it, up to so many seconds; whether it holds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(task: Task) -> list[str]:
    """The command lines of the workers that run arms of this task."""
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "kda_judge.arms.arm_worker" in line and str(task.path) in line]
