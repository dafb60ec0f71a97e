"""A scripted agent in a real worktree, through `kda` and the real judge, without a GPU: what it does, the record says.

What a GPU decides, keep and revert, is in `test_campaign_iterate.py`, where the judge's times are a stand-in's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.tools.tests.campaign_toy import git, make_repository
from core.tools.tests.test_campaign_launch import program
from kda_judge.contract.errors import ExitCode
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_tools.campaign.events import Decision
from kda_tools.campaign.history import recorded

AGENT = """
import os, pathlib, signal, subprocess, sys, time

assert "You optimise one kernel task, `axpy`" in sys.stdin.read()
task = pathlib.Path("toys/k90_axpy")
solution, good = task / "solution" / "__init__.py", (task / "solution" / "__init__.py").read_text()

def kda(*words):
    done = subprocess.run(["kda", "campaign", *words], capture_output=True, text=True)
    print(f"{words[0]} {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1]}", flush=True)
    return done

def iterate(text, message, *more):
    solution.write_text(text)
    return kda("iterate", "-m", message, *more)

iterate(good.replace("alpha=factor)", "alpha=factor) + 0 * x", 1), "improves: one more term, which changes nothing")
iterate(good.replace("torch.add(y, x, alpha=factor).contiguous()", "torch.add(y, x)"), "breaks: leaves the factor out")
cheat = "LAST = {}\\n\\n\\ndef axpy(x, y, *, factor):\\n    key = (x.data_ptr(), y.data_ptr())\\n" \\
    "    if key not in LAST:\\n        LAST[key] = torch.add(y, x, alpha=factor).contiguous()\\n" \\
    "    return LAST[key].clone()\\n"
iterate(good.replace("def axpy_(", cheat + "\\n\\ndef axpy_("), "cheats: remembers results by pointer")
(task / "config.toml").write_text((task / "config.toml").read_text().replace("atol = 1e-5", "atol = 1e9"))
iterate(good + "\\n# more\\n", "edits the harness: a wider tolerance")
subprocess.run(["git", "checkout", "-q", "HEAD", "--", str(task / "config.toml")], check=True)
iterate(good + "\\n# slow\\n", "stalls: a comment, after two failures and without another direction")
killed = subprocess.Popen(
    ["kda", "campaign", "iterate", "-m", "is killed: a comment", "--direction", sys.argv[1]], stderr=subprocess.DEVNULL
)
journal = pathlib.Path(os.environ["JOURNAL"])
end = time.time() + 60
while b"is killed: a comment" not in journal.read_bytes():
    assert killed.poll() is None and time.time() < end
    time.sleep(0.05)
killed.send_signal(signal.SIGKILL)
killed.wait()
kda("resume")
iterate(good + "\\n# stalls\\n", "exceeds the budget: one more")
iterate(good + "\\n# stalls more\\n", "exceeds the budget: another one")
"""

DIRECTION = "give up remembering results, and read less: the counters show that bytes decide"


@pytest.fixture
def repository(checkout: Path) -> Task:
    grid = checkout / "toys" / "k90_axpy" / "bench" / "grid.py"
    assert not grid.exists()
    return make_repository(checkout, 'tries = 6\nstall = 2\nrows = ["out-*"]\n')


def test_an_agents_campaign(repository: Task, checkout: Path, tmp_path: Path) -> None:
    outside = checkout.with_name(f"{checkout.name}-outside")
    agent = outside / "agent.py"
    program(outside / "kda", f'#!/bin/sh\nexec {sys.executable} -m kda_tools "$@"\n')
    agent.write_text(AGENT)
    journal = checkout / ".git" / "kda" / "campaigns" / "k90_h200_axpy.jsonl"
    env = {**os.environ, "PYTHONPATH": import_path(), "PATH": f"{outside}:{os.environ['PATH']}", "HOME": str(outside)}
    env |= {"KDA_WORKTREES": str(outside / "trees"), "JOURNAL": str(journal), "COLUMNS": "200"}
    env.pop("KDA_NO_CLAUDE", None)
    bare = [path for path in env["PATH"].split(":") if not (Path(path) / "bwrap").exists()]
    links = outside / "links"  # the same programs without bwrap, in which nothing of this test could be looked into
    links.mkdir()
    for name in ("git", "bash", "sh"):
        (links / name).symlink_to(str(shutil.which(name)))
    env["PATH"] = ":".join([*bare, str(links)])
    command = [
        "kda",
        "campaign",
        "launch",
        "axpy",
        "--agent",
        "command",
        "--command",
        f"{sys.executable} {agent} '{DIRECTION}'",
    ]
    ran = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == ExitCode.OK, ran.stdout + ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.startswith(("iterate ", "resume "))]
    refusal = f"iterate {ExitCode.USAGE}"
    assert [line.split(":")[0] for line in said[:5]] == ["iterate 0"] * 3 + [refusal] * 2
    assert "2 iterations without improvement: the next one needs --direction" in said[4]

    task = Task(outside / "trees" / "k90_h200_axpy" / "toys" / "k90_axpy")
    (state,) = recorded(task)
    ends = {number: (done.decision, done.reason) for number, done in state.finished_iterations.items()}
    assert ends[1][0] is Decision.CHECKED, ends[1]
    assert ends[2][0] is Decision.FAILED
    assert "out-64x16: INCORRECT: solution: output 'out'" in ends[2][1]
    assert ends[3][0] is Decision.FAILED, "remembered results are found out"
    assert "INCORRECT" in ends[3][1]
    (refused,) = state.refused
    assert refused.hypothesis.startswith("edits the harness")
    assert "toys/k90_axpy/config.toml: changed; the card does not allow it" in refused.reason
    assert ends[4][0] is Decision.CHECKED, "killed while it was measured, and measured again"
    assert state.begun[4].attempt == 2
    assert state.directions == [DIRECTION]
    assert state.tries == 6
    assert state.ended == "6 of 6 tries are spent"
    assert f"iterate {ExitCode.USAGE}" in said[-1]
    assert "has ended: 6 of 6 tries are spent" in said[-1]
    root = task.path.parents[1]
    subjects = git(root, "log", "--reverse", "--format=%s", "main..HEAD").splitlines()
    assert [subject.split(":")[0] for subject in subjects] == [
        "[iter 1] improves",
        "[iter 2] breaks",
        "[iter 3] cheats",
        "[iter 4] is killed",
        "[iter 5] exceeds the budget",
    ]
    assert git(checkout, "rev-parse", "campaign/k90_h200_axpy/best") == git(checkout, "rev-parse", "main")
    shown = subprocess.run(
        ["kda", "campaign", "status"], cwd=root, env=env, capture_output=True, text=True, check=False
    ).stdout
    for words in ("1 refused", "best so far: the base", "left: 0 of 6 tries", "ended: 6 of 6 tries are spent"):
        assert words in shown
