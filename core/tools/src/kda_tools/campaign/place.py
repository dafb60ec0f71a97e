"""Where a campaign lives: names of its worktree, branches and record, and the campaign that a folder belongs to."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import NUMBER, Task, checkout_root, find_task
from kda_tools.campaign.journal import COPY, Journal
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.state import State, current

WORKTREES = "KDA_WORKTREES"
"""Variable that names the folder for worktrees; if it is not set, `NAME-campaigns` beside the checkout."""
STATE_FOLDER = "kda/campaigns"
"""Folder of the records, in git's own folder."""


def name_of(task: Task, target: str) -> str:
    """Name of a campaign, such as `k03_h200_qknorm_rope`; also that of the launch script."""
    number = NUMBER.match(task.folder)
    return f"{number[0] if number else ''}{target}_{task.op}"


def demand_target(task: Task, target: str) -> None:
    """Raise a UsageError if the task's config has no such target."""
    if target not in task.config.targets:
        close = ", ".join(nearest(target, task.config.targets)) or "none"
        raise UsageError(
            f"--target {target!r}: {task.path / 'config.toml'} has no [targets.{target}]; nearest: {close}"
        )


@dataclass(frozen=True)
class Campaign:
    """A launched campaign, seen from its worktree."""

    name: str
    task: Task
    repository: Repository
    """The worktree."""

    @property
    def branch(self) -> str:
        """The branch of the worktree; every iteration is a commit of it."""
        return branch_of(self.name)

    @property
    def best_branch(self) -> str:
        """The branch of the best so far."""
        return f"campaign/{self.name}/best"

    @property
    def journal(self) -> Journal:
        """The record."""
        return Journal(self.repository.common / STATE_FOLDER / f"{self.name}.jsonl", self.name, self.task.op)

    @property
    def folder(self) -> str:
        """The task's folder in the repository."""
        return self.task.path.relative_to(self.repository.root).as_posix()

    @property
    def copy(self) -> str:
        """The committed copy of the record, in the repository."""
        return f"{self.folder}/docs/{COPY}"

    def state(self) -> State:
        """What the record says now."""
        found = current(self.journal.read())
        assert found is not None
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other commands from writing to the campaign; a UsageError if one does so already."""
        path = self.journal.path.with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"campaign {self.name}: another command writes to it, for example iterate; wait for its end"
                ) from None
            yield

    def ref(self, iteration: int) -> str:
        """The git reference that keeps the candidate of an iteration, however that ends."""
        return f"refs/kda/{self.name}/{iteration}"

    @property
    def head_ref(self) -> str:
        """The git reference to the commit of the last iteration, whatever the agent has committed since."""
        return f"refs/kda/{self.name}/head"

    def sync(self, state: State) -> None:
        """Bring the worktree's copy of the record up to date."""
        before = self.repository.content(state.launched.base, self.copy)
        path = self.repository.root / self.copy
        path.parent.mkdir(parents=True, exist_ok=True)
        self.journal.copy_to(path, before)

    def edited(self, state: State) -> bool:
        """Whether the copy holds lines that were never recorded."""
        path = self.repository.root / self.copy
        whole = self.repository.content(state.launched.base, self.copy) + self.journal.content()
        return path.is_file() and not whole.startswith(path.read_bytes())


def branch_of(name: str) -> str:
    """The branch that a campaign's worktree is on."""
    return f"campaign/{name}/work"


def worktree_of(root: Path, name: str) -> Path:
    """Where the campaign's worktree goes."""
    parent = Path(os.environ[WORKTREES]) if os.environ.get(WORKTREES) else root.parent / f"{root.name}-campaigns"
    return parent.resolve() / name


def current_campaign() -> Campaign:
    """The campaign of the current folder.

    Raises:
        UsageError: the folder is in no worktree of a campaign; names the campaigns that there are.
    """
    root = checkout_root()
    repository = Repository((root or Path.cwd()).resolve())
    if (name := campaign_of(repository)) is None:
        branch = repository.ask("symbolic-ref", "--short", "HEAD")
        known = (repository.ask("for-each-ref", "--format=%(refname:short)", "refs/heads/campaign") or "").split()
        names = [name.split("/")[1] for name in known if name.endswith("/work")]
        there = f"; campaigns of this repository: {', '.join(names)}" if names else "; none was launched here"
        raise UsageError(
            f"{repository.root}: expected the worktree of a campaign, whose branch is campaign/NAME/work, got branch "
            f"{branch or '(none)'}{there}. Launch one: kda campaign launch TASK --target NAME"
        )
    return opened(name, repository)


def campaign_of(repository: Repository) -> str | None:
    """The name of the campaign whose worktree this is, by its branch; None if it is none."""
    found = re.fullmatch(r"campaign/(.+)/work", repository.ask("symbolic-ref", "--short", "HEAD") or "")
    return found[1] if found else None


def opened(name: str, repository: Repository) -> Campaign:
    """The campaign of that name in this worktree.

    Raises:
        UsageError: it was never launched, or its record is not here.
    """
    path = repository.common / STATE_FOLDER / f"{name}.jsonl"
    entries = Journal(path, name, "").read()
    if not entries:
        raise UsageError(f"{path}: expected the record of campaign {name}, found none: launch it here")
    task = find_task(entries[0].task)
    return Campaign(name, Task(task.path.resolve()), repository)
