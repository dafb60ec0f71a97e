"""Tell whether a task's files have changed since a record (profile, sanitizer run, grid) was made."""

from collections.abc import Sequence

from kda_judge.contract.tasks import Task
from kda_judge.evidence import provenance
from kda_judge.evidence.provenance import pins
from kda_judge.evidence.run_record import Provenance
from kda_tools.publish.read_once import once_per_task

PARTS = ("solution", "library")
"""The parts that decide which kernels run: the solution, and the library that it shares with others."""

CHANGES = " with changes"
"""Written after the commit of a run whose checkout differed from it."""
LOST = "**its checkout had changes, and its files are not those of this one**"
"""Said of a run that `is_lost`."""


@once_per_task
def hashes(task: Task) -> dict[str, str]:
    """Part of the task -> sha256 of what it holds now."""
    return provenance.hashes(task)


def is_outdated(task: Task, source: Provenance) -> bool:
    """Whether the solution or the shared library has changed since `source` was recorded."""
    return not set(PARTS).isdisjoint(changed(task, source))


def changed(task: Task, source: Provenance) -> list[str]:
    """The parts whose content, and the arms whose pin, has changed since `source` was recorded."""
    then, now = provenance.own(source.hashes), hashes(task)
    found = [part for part in dict.fromkeys((*now, *then)) if then.get(part) != now.get(part)]
    pinned = pins(task.config)
    return [*found, *(f"pin of {arm}" for arm, pin in source.pins.items() if pinned.get(arm) != pin)]


def is_lost(dirty: bool, differing: Sequence[str]) -> bool:
    """Whether nobody can have the files of a run: its checkout was dirty, and they differ from what is here now.

    A dirty run whose hashes all are those of the present files is as good as a clean one. What had changed decides no
    number, or is committed since; a run of files that nobody commits fails `kda publish --check` in a fresh clone.
    """
    return dirty and bool(differing)


def described(source: Provenance, command: str) -> str:
    """Commit and command, in Markdown."""
    return f"{commit_md(source)}, `{command}`"


def commit_md(source: Provenance) -> str:
    """The commit, and whether the checkout differed from it, in Markdown."""
    return f"commit `{source.commit[:10]}`{' (dirty)' if source.dirty else ''}"
