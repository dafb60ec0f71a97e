"""Git commands of campaigns. They use an index of their own, so that the agent's index and its flags do not matter."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.contract.errors import MissingRequirement, UsageError

QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "commit.gpgSign=false")
"""Options that keep hooks of the worktree from running while a record is made."""
WITHOUT_IGNORES = ("-c", "core.excludesFile=/dev/null")
BYTECODE = re.compile(r"(^|/)__pycache__/[^/]+\.pyc(\.\d+)?$")
"""Bytecode in `__pycache__`, and no other file there: a source there can be imported."""
NAME = "kda campaign"
EMAIL = "campaign@kda.invalid"
"""Author and committer, with `NAME`, if git has no user."""


@dataclass(frozen=True)
class Repository:
    """A checkout or a worktree."""

    root: Path

    def run(self, *words: str, given: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """Output of a git command.

        Raises:
            UsageError: git fails; the message holds its words.
            MissingRequirement: there is no git.
        """
        command = ["git", "-C", str(self.root), *QUIET, *words]
        try:
            ran = subprocess.run(
                command,
                input=given,
                env={**_environment(), **(env or {})},
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",  # names of files go back to git as they came
                check=False,
            )
        except FileNotFoundError:
            raise MissingRequirement("git: not found on PATH; a campaign lives in a git worktree") from None
        if ran.returncode:
            raise UsageError(as_utf8(f"git {' '.join(words)}: {ran.stderr.strip() or f'ended with {ran.returncode}'}"))
        return ran.stdout

    def ask(self, *words: str) -> str | None:
        """The output of `run` without blanks around it; None if git fails."""
        try:
            return self.run(*words).strip()
        except UsageError:
            return None

    @property
    def common(self) -> Path:
        """Git's own folder, which all worktrees share."""
        return (self.root / self.run("rev-parse", "--git-common-dir").strip()).resolve()

    @property
    def private(self) -> Path:
        """Git's folder of this worktree alone."""
        return (self.root / self.run("rev-parse", "--git-dir").strip()).resolve()

    def commit_of(self, name: str) -> str | None:
        """The commit that a name stands for."""
        return self.ask("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")

    def content(self, commit: str, path: str) -> bytes:
        """A file's bytes in a commit; empty if it is not there."""
        command = ["git", "-C", str(self.root), "show", f"{commit}:{path}"]
        ran = subprocess.run(command, capture_output=True, check=False)
        return ran.stdout if ran.returncode == 0 else b""

    @contextmanager
    def index(self, commit: str) -> Iterator[dict[str, str]]:
        """Environment of git commands that use a fresh index, which holds `commit`: no flag hides a file from it."""
        with TemporaryDirectory(prefix="kda-index-") as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self.run("read-tree", commit, env=env)
            yield env

    def changed(self, commit: str) -> dict[str, str]:
        """Path -> A, M, D or T: how the worktree's files differ from `commit`, by content; new files included.

        Only `.gitignore` files hide new files, not the user's or the repository's private lists.
        """
        with self.index(commit) as env:
            listed = self.run("diff", "--no-ext-diff", "--name-status", "-z", "--no-renames", env=env).split("\0")
            found = dict(zip(listed[1::2], listed[0::2], strict=False))
            words = (*WITHOUT_IGNORES, "ls-files", "--others", "--exclude-per-directory=.gitignore", "-z")
            new = self.run(*words, env=env).split("\0")
            return found | dict.fromkeys(filter(None, new), "A")

    def ignored(self, commit: str, folder: str) -> list[str]:
        """New files below `folder` that a `.gitignore` hides from `changed`, except the bytecode of `__pycache__`."""
        with self.index(commit) as env:
            words = ("ls-files", "--others", "--ignored", "--exclude-per-directory=.gitignore", "-z", "--", folder)
            found = self.run(*WITHOUT_IGNORES, *words, env=env).split("\0")
        return [path for path in found if path and BYTECODE.search(path) is None]

    def tree(self, commit: str, paths: Iterable[str]) -> str:
        """Make a tree: `commit`, but these paths as they are in the worktree (changed, new or gone)."""
        with self.index(commit) as env:
            given = "".join(f"{path}\0" for path in paths)
            self.run("update-index", "--add", "--remove", "-z", "--stdin", given=given, env=env)
            return self.run("write-tree", env=env).strip()

    def mixed(self, commit: str, other: str, paths: Iterable[str]) -> str:
        """Make a tree: `commit`, but these paths as they are in `other`."""
        wanted = list(paths)
        listed = self.run("ls-tree", "-r", "-z", other, "--", *wanted).split("\0") if wanted else []
        gone = "".join(f"0 {'0' * 40}\t{path}\0" for path in wanted)
        with self.index(commit) as env:
            given = gone + "".join(f"{line}\0" for line in filter(None, listed))
            self.run("update-index", "-z", "--index-info", given=given, env=env)
            return self.run("write-tree", env=env).strip()

    def commit(self, tree: str, parent: str, message: str) -> str:
        """Make a commit that is on no branch yet."""
        return self.run("commit-tree", tree, "-p", parent, "-F", "-", given=message, env=self._author()).strip()

    def restore(self, commit: str, paths: Iterable[str]) -> None:
        """Restore these files of the worktree from `commit`; files that it lacks are removed."""
        with self.index(commit) as env:
            there = set(self.run("ls-files", "-z", env=env).split("\0"))
            wanted = list(paths)
            kept = [path for path in wanted if path in there]
            given = "".join(f"{path}\0" for path in kept)
            self.run("checkout-index", "-f", "-z", "--stdin", given=given, env=env)
            for path in set(wanted) - there:
                (self.root / path).unlink(missing_ok=True)

    def extract(self, commit: str, folder: str, to: Path) -> None:
        """Write a folder of a commit below `to`, at the same relative path."""
        with self.index(commit) as env:
            paths = self.run("ls-files", "-z", "--", folder, env=env)
            self.run("checkout-index", "-f", "-z", "--stdin", f"--prefix={to}/", given=paths, env=env)

    def diff(self, old: str, new: str, form: str, folder: str = ".") -> str:
        """The output of `git diff` for two commits, in this form and below this folder, as `as_utf8` makes it."""
        words = ("--no-color", "--no-ext-diff", "--no-renames", *form.split())
        return as_utf8(self.run("diff", *words, old, new, "--", folder))

    def _author(self) -> dict[str, str]:
        if self.ask("config", "user.email"):
            return {}
        people = ("AUTHOR", "COMMITTER")
        return {f"GIT_{who}_{what}": value for who in people for what, value in (("NAME", NAME), ("EMAIL", EMAIL))}


def as_utf8(text: str) -> str:
    """The text with a replacement character for every byte that is no UTF-8, so that a record can hold it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _environment() -> dict[str, str]:
    """The environment without variables that lead git to another repository or index, and with English messages."""
    hidden = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR"}
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"LC_ALL": "C"}
