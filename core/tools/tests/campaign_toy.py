"""A campaign on the toy task in a real git repository, and a stand-in for the judge that reads speeds in files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Verdict
from kda_tools.campaign import iterate, launch, measure
from kda_tools.campaign.events import RowOutcome
from kda_tools.campaign.measure import Measured
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.rules import Rules

PEOPLE = ("AUTHOR", "COMMITTER")
GIT = {f"GIT_{who}_{what}": value for who in PEOPLE for what, value in (("NAME", "t"), ("EMAIL", "t@t"))}
NAME = "k90_h200_axpy"
HYPOTHESIS = "fewer bytes: y is read once"


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, **GIT}
    return subprocess.run(["git", "-C", folder, *words], env=env, capture_output=True, text=True, check=True).stdout


def make_repository(checkout: Path, rules: str = "") -> Task:
    """The toy checkout as a git repository with one commit."""
    task = Task(checkout / "toys" / "k90_axpy")
    (task.path / "prompt.md").write_text("# axpy: a toy\n\nThe card.\n")
    (task.path / "docs").mkdir(exist_ok=True)
    (task.path / "docs" / "dispatch.md").write_text("# Which call takes which path, and why\n")
    (task.path / "tests").mkdir(exist_ok=True)
    (task.path / "tests" / "test_op.py").write_text("def test_one():\n    assert True\n")
    (checkout / "core" / "pyproject.toml").touch()  # git keeps no empty folder
    (checkout / ".gitignore").write_text("__pycache__/\n*.cubin\n")
    if rules:
        (task.path / "campaign.toml").write_text(rules)
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "begin")
    return task


def launched(checkout: Path, monkeypatch: pytest.MonkeyPatch, rules: str = "") -> Campaign:
    """A campaign on the toy, with no agent started; the current folder is its worktree."""
    task = make_repository(checkout, rules)
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    monkeypatch.setenv("KDA_WORKTREES", str(checkout.with_name(f"{checkout.name}-trees")))
    monkeypatch.setenv("HOME", str(checkout))
    monkeypatch.setattr(launch.doctor, "kernel_checks", lambda _: [])
    prepared = launch.prepare(checkout.resolve(), task, "h200", "command", "true")
    monkeypatch.chdir(prepared.campaign.repository.root)
    return prepared.campaign


def speed(campaign: Campaign, value: float, **more: object) -> None:
    """Change the candidate: the judge's stand-in reads how fast it is from its text."""
    path = campaign.task.path / "solution" / "__init__.py"
    text = re.sub(r"(?m)^# (speed|verdict|rows): .*\n", "", path.read_text())
    lines = [f"# speed: {value}", *(f"# {key}: {said}" for key, said in more.items())]
    path.write_text("\n".join([text.rstrip(), *lines, ""]))


def said(text: str, key: str, default: str) -> str:
    found = re.search(rf"(?m)^# {key}: (.*)$", text)
    return found[1] if found else default


def judge(noise: float = 0.0005, seed: int = 0) -> Callable[..., Measured]:
    """In the judge's place: 10 us divided by the speed that each solution states, with noise between processes."""
    rng = np.random.default_rng(seed)

    def stand_in(task: Task, rules: Rules, repository: Repository, best: str, target: str) -> Measured:
        folder = task.path.relative_to(repository.root).as_posix()
        texts = {
            "best": repository.content(best, f"{folder}/solution/__init__.py").decode(),
            "solution": (task.path / "solution" / "__init__.py").read_text(),
        }
        verdict = Verdict(said(texts["solution"], "verdict", "NOT_FASTER"))
        slow = said(texts["solution"], "rows", "")

        def times(arm: str, row: str) -> tuple[tuple[float, ...], ...]:
            factor = 0.9 if arm == "solution" and row == slow else 1.0
            base = 10 / factor / (float(said(texts[arm], "speed", "1")) if arm in texts else 0.5)
            return tuple(
                tuple(base * np.exp(rng.normal(0, noise) + rng.normal(0, noise / 4, rules.samples)))
                for _ in range(rules.generations)
            )

        rows = tuple(
            RowOutcome(
                id=row,
                verdict=verdict,
                reason="as the test says",
                metric="device",
                samples={arm: times(arm, row) for arm in ("baseline", "best", "solution")},
                used=0.1,
            )
            for row in measure.chosen_rows(task, rules)
        )
        return Measured("20261123T000000Z-000001", "NVIDIA H200", rows)

    return stand_in


@pytest.fixture
def campaign(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    made = launched(checkout, monkeypatch)
    monkeypatch.setattr(iterate, "measure", judge())
    monkeypatch.setattr(iterate, "demand_idle_gpu", lambda: True)
    return made
