"""For tasks' tests: run a program beside a release's pinned files, and stand-ins for a release's modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType

from kda_judge.arms.upstream import cache_folder, fetch
from kda_judge.contract.tasks import Task, checkout_root


def run_beside(task: Task, pin: str, program: str) -> None:
    """Run a Python program in a process of its own, in which Triton compiles; its argument is the pinned files' folder.

    Raises:
        KdaError: the pinned files are not in the cache, or are not those of the task's list.
        AssertionError: the program failed; has what it wrote to stderr.
    """
    pinned = task.config.upstream[pin]
    tree = fetch(pinned, task.path / pinned.files, cache_folder(checkout_root()), offline=True)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, str(tree)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def stand_ins(modules: Mapping[str, Mapping[str, object]]) -> dict[str, ModuleType]:
    """For `sys.modules`: modules that hold the given names, and the packages that they are in, by dotted name."""
    found: dict[str, ModuleType] = {}
    for name, held in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        vars(found[name]).update(held)
    return found
