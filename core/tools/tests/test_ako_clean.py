"""`ensure_ako4all_clean.sh` on local repositories in every bad state."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "diffusion" / "scripts" / "ensure_ako4all_clean.sh"
NAMED = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str) -> str:
    env = {**os.environ, **NAMED, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", text)
    return git(folder, "rev-parse", "HEAD")


class Place:
    """An upstream repository, and a base folder with or without a checkout of it."""

    def __init__(self, folder: Path) -> None:
        self.upstream, self.base = folder / "upstream", folder / "base"
        self.upstream.mkdir()
        self.base.mkdir()
        git(self.upstream, "init", "-qb", "trunk")  # no name that the script could have guessed
        commit(self.upstream, "TASK.md", "one")
        self.tree = self.base / "AKO4ALL"

    def clone(self) -> Path:
        git(self.base, "clone", "-q", str(self.upstream), "AKO4ALL")
        return self.tree

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        named = {"AKO4ALL_UPSTREAM_URL": str(self.upstream), "GIT_CONFIG_GLOBAL": os.devnull, **env}
        return subprocess.run(
            ["bash", str(SCRIPT), str(self.base)], env={**os.environ, **NAMED, **named}, capture_output=True, text=True
        )

    def demand_clean(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{self.tree}\n"
        assert git(self.tree, "rev-parse", "HEAD") == git(self.upstream, "rev-parse", "trunk")
        assert git(self.tree, "remote", "get-url", "upstream") == str(self.upstream)
        assert git(self.tree, "status", "--porcelain") == ""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_it_clones_and_then_follows_upstream(place: Place) -> None:
    place.demand_clean(place.run())
    place.demand_clean(place.run())
    commit(place.upstream, "TASK.md", "two")
    commit(place.upstream, "HINTS.md", "three")
    place.demand_clean(place.run())
    assert (place.tree / "HINTS.md").is_file()


def test_a_fork_that_is_behind_ends_at_upstream(place: Place, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(place.upstream), "fork")
    commit(place.upstream, "TASK.md", "two")
    place.demand_clean(place.run(AKO4ALL_URL=str(tmp_path / "fork")))
    assert git(place.tree, "remote", "get-url", "origin") == str(tmp_path / "fork")


def dirty(place: Place) -> None:
    (place.clone() / "TASK.md").write_text("mine")


def staged(place: Place) -> None:
    (place.clone() / "TASK.md").write_text("mine")
    git(place.tree, "add", "-A")


def untracked(place: Place) -> None:
    (place.clone() / "notes").write_text("mine")


def ahead(place: Place) -> None:
    commit(place.clone(), "TASK.md", "mine")


def diverged(place: Place) -> None:
    commit(place.clone(), "TASK.md", "mine")
    commit(place.upstream, "TASK.md", "theirs")


def another_branch(place: Place) -> None:
    git(place.clone(), "switch", "-qc", "mine")


def detached(place: Place) -> None:
    git(place.clone(), "switch", "-q", "--detach")


def merging(place: Place) -> None:
    tree = place.clone()
    git(tree, "switch", "-qc", "side")
    commit(tree, "other", "side")
    git(tree, "switch", "-q", "trunk")
    git(tree, "merge", "-q", "--no-ff", "--no-commit", "side")


def another_upstream(place: Place) -> None:
    git(place.clone(), "remote", "add", "upstream", str(place.base))


def a_file(place: Place) -> None:
    place.tree.write_text("mine")


def a_folder(place: Place) -> None:
    """Inside a repository, so that git finds one above it."""
    git(place.base, "init", "-q")
    place.tree.mkdir()


def no_upstream(place: Place) -> None:
    place.clone()
    place.upstream.rename(place.upstream.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (dirty, "has changes:\n M TASK.md"),
        (staged, "has changes:\nM  TASK.md"),
        (untracked, "has changes:\n?? notes"),
        (ahead, "is 1 commits ahead of upstream/trunk"),
        (diverged, "has diverged from upstream/trunk: 1 commits of its own, 1 of upstream's"),
        (another_branch, "is on mine, expected trunk"),
        (detached, "is on no branch (detached HEAD), expected trunk"),
        (merging, "something is unfinished there (MERGE_HEAD)"),
        (another_upstream, "its remote upstream is"),
        (a_file, "is no git checkout of its own"),
        (a_folder, "is no git checkout of its own"),
        (no_upstream, "cannot be fetched"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_refused_stays_as_it_is(place: Place, spoil: Callable[[Place], None], words: str) -> None:
    spoil(place)
    inside = place.tree.is_dir() and (place.tree / ".git").exists()
    before = (git(place.tree, "rev-parse", "HEAD"), git(place.tree, "status", "--porcelain=v2")) if inside else None
    done = place.run()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) >= 2, "no remedy"
    if before:
        assert (git(place.tree, "rev-parse", "HEAD"), git(place.tree, "status", "--porcelain=v2")) == before


def test_a_branch_that_is_not_there(place: Place) -> None:
    assert "has no branch gone" in place.run(AKO4ALL_BRANCH="gone").stderr


def test_an_address_that_is_not_there(place: Place) -> None:
    assert "cannot be cloned" in place.run(AKO4ALL_URL=str(place.base / "gone")).stderr
    assert not place.tree.exists()
