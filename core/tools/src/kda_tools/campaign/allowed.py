"""Check what an agent changed in a task against docs/work_on_a_task.md: by content, whatever git's index says."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import kda_judge
import kda_runtime
import kda_tools
from kda_judge.contract.tasks import Task
from kda_judge.evidence import provenance
from kda_tools.campaign.journal import COPY
from kda_tools.campaign.repository import Repository, as_utf8

FREE = (
    *("solution/*", "docs/dispatch.md", "bench/tune.py"),
    *("docs/tuning.md", "docs/tuning*.csv", "docs/profile.md", "docs/sanitize.md", "docs/tried.md"),
)
"""Files of the task's folder that may be edited, added and removed. `*` also matches subfolders."""
LOGS = ("docs/tuning.jsonl", "docs/profile.jsonl", "docs/sanitize.jsonl", "docs/tried.jsonl")
"""Logs of `kda tune`, `kda profile`, `kda sanitize` and `kda bench --tried`, which may only grow."""
TESTS = "tests/*"
"""Files and lines may be added here, and none removed."""
OWN = f"docs/{COPY}"
"""The copy of the record, which the campaign itself writes."""
KEPT = ("docs/dispatch.md", "docs/profile.md", "docs/sanitize.md", "docs/tried.md", *LOGS[1:], OWN)
"""Files that stay when an iteration is reverted: notes on what failed, and what tools recorded."""
TASK_PARTS = ("baseline", "workloads", "reference", "config", "harness")
"""Parts of the task whose hashes must be those of the launch."""


def protected_hashes(task: Task) -> dict[str, str]:
    """sha256 of what decides an iteration besides the solution: the task's frozen parts, and the code that runs now."""
    hashes = provenance.hashes(task)
    packages = {module.__name__: Path(str(module.__file__)).parent for module in (kda_judge, kda_runtime, kda_tools)}
    code = {name: provenance.content_hash(folder, ["**/*"]) for name, folder in packages.items()}
    return {part: hashes[part] for part in TASK_PARTS} | code


def changed_since_launch(task: Task, launched: dict[str, str]) -> list[str]:
    """A line for each part that has changed since the launch."""
    now = protected_hashes(task)
    return [
        f"{part}: sha256 was {launched[part][:12]} at the launch, is {now.get(part, 'absent')[:12]}"
        for part in launched
        if now.get(part) != launched[part]
    ]


def sorted_changes(repository: Repository, task: Task, base: str) -> tuple[list[str], list[str]]:
    """Changes of the worktree against `base`: the paths that may be changed, and a line for each that may not."""
    prefix = f"{task.path.relative_to(repository.root).as_posix()}/"
    good, bad = [], []
    for path, status in sorted(repository.changed(base).items()):
        inside = path.removeprefix(prefix) if path.startswith(prefix) else None
        why = _refused(repository, base, path, inside, status)
        if why is None:
            good.append(path)
        else:
            bad.append(f"{as_utf8(path)}: {why}")
    hidden = repository.ignored(base, f"{prefix}solution")
    return good, bad + [f"{as_utf8(path)}: added; .gitignore hides it, so no commit would have it" for path in hidden]


def _refused(repository: Repository, base: str, path: str, inside: str | None, status: str) -> str | None:
    """Why the card does not allow this change; None if it does."""
    verb = {"A": "added", "D": "removed"}.get(status, "changed")
    if path != as_utf8(path):
        return f"{verb}; expected a name in UTF-8"
    if inside is None:
        return f"{verb}; it is outside of the task"
    if status == "T":
        return "became another kind of file, a link for example"
    if (repository.root / path).is_symlink():
        return f"{verb}; links are not allowed"
    if inside == OWN or any(fnmatchcase(inside, pattern) for pattern in FREE):
        return None
    if inside in LOGS:
        there = repository.root / path
        longer = there.is_file() and there.read_bytes().startswith(repository.content(base, path))
        return None if longer else f"{verb}; a log is only ever appended to, by kda"
    if fnmatchcase(inside, TESTS):
        return None if status == "A" or not _takes_away(repository, base, path) else f"{verb}; tests may only be added"
    return f"{verb}; the card does not allow it"


def _takes_away(repository: Repository, base: str, path: str) -> bool:
    """Whether a line of the base's file is gone."""
    there = repository.root / path
    if not there.is_file():
        return True
    left = iter(there.read_bytes().splitlines())
    return not all(any(line == other for other in left) for line in repository.content(base, path).splitlines())
