"""Changes of a solution that were measured and not adopted: one JSON line in a task's `docs/tried.jsonl` each."""

from difflib import unified_diff
from pathlib import Path
from typing import Literal

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import RunRecord

SOLUTION = "solution"
"""The arm, and its folder, that a change is made to."""


class TriedRecord(Strict):
    """A change, as a patch, and the run that measured it against the solution that it changes."""

    schema_version: Literal[1] = 1
    task: str
    name: str
    """The arm in `run` that has the change."""
    change: str
    """What was changed, in a sentence."""
    patch: str
    """A unified diff that `git apply` takes in the checkout's root."""
    run: RunRecord


def log(task: Task) -> Path:
    """Every tried change of the task; `docs/tried.md` is generated from it."""
    return task.path / "docs" / "tried.jsonl"


def patch_of(task: Task, folder: Path) -> str:
    """The patch that makes the package in `folder` of the solution.

    Raises:
        UsageError: the package is the solution, unchanged.
    """
    old, new = _texts(task.path / SOLUTION), _texts(folder)
    if old == new:
        raise UsageError(f"{folder}: expected a changed copy of {task.path / SOLUTION}, got the same files")
    inside = f"{task.path.parent.name}/{task.path.name}/{SOLUTION}"
    return "".join(
        line
        for name in sorted({*old, *new})
        for line in unified_diff(
            old.get(name, []),
            new.get(name, []),
            f"a/{inside}/{name}" if name in old else "/dev/null",
            f"b/{inside}/{name}" if name in new else "/dev/null",
        )
    )


def _texts(folder: Path) -> dict[str, list[str]]:
    """The package's source files: path inside it -> lines, the last one ended, too."""
    paths = [path for kind in ("*.py", "*.toml", "*.cu", "*.cuh") for path in folder.rglob(kind)]
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {name: [f"{line}\n" for line in text.splitlines()] for name, text in texts.items()}
