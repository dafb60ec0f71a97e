"""Arms that cheat or fail, and what several of them need."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


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


def forge(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have the worker send what `change` makes of a timed loop's facts, also where the reply's model forbids it."""
    worker: Any = sys.modules["kda_judge.arms.arm_worker"]
    timed = worker.Timed
    worker.Timed = lambda **facts: timed.model_construct(**change(facts))


def shaved(facts: dict[str, Any], share: float) -> dict[str, Any]:
    """The facts with this share of the time that passed, of both clocks where both were read."""
    return facts | {key: facts[key] * share for key in ("total_us", "events_us") if facts.get(key)}
