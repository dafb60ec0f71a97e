"""The scripted agent of the example campaign: its steps fit the kernel as it is, alone and behind each other."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomli

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "diffusion" / "scripts" / "scripted_agent.py"


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripted_agent", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scripted_agent"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_changes_what_is_there_whatever_was_kept(agent: ModuleType) -> None:
    best = {file: (ROOT / file).read_text() for file in (agent.KERNEL, agent.TABLE)}
    alone = [(step, step.edit(best[step.file])) for step in agent.STEPS]
    for step, text in alone:
        assert text != best[step.file], step.hypothesis
    for step in agent.STEPS:  # all kept
        text = step.edit(best[step.file])
        assert text != best[step.file], step.hypothesis
        best[step.file] = text
    for text in (best[agent.KERNEL], *(text for step, text in alone if step.file == agent.KERNEL)):
        ast.parse(text)
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]  # undefined names
        done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert text.count("cos_b, sin_b = weighted_angles(") == text.count("angles = cache + ") == 2  # two kernels
    entries = tomli.loads(best[agent.TABLE])["qknorm_rope"]
    assert [entry["config"]["warps"] for entry in entries] == [2, 8]
    assert all("scripted" in entry["reason"] for entry in entries)


def test_the_tables_are_loaded_before_the_heads(agent: ModuleType) -> None:
    text = agent.tables_first((ROOT / agent.KERNEL).read_text())
    assert text.index("angles = cache") < text.index("cos_a, sin_a") < text.index("loaded = ()")
    again = agent.tables_first(agent.positions_first((ROOT / agent.KERNEL).read_text()))
    assert again.index("place = tl.load(") < again.index("angles = cache + place") < again.index("loaded = ()")


def test_rows_that_a_step_is_about_are_there(agent: ModuleType) -> None:
    from kda_judge.contract.tasks import find_task
    from kda_judge.contract.workloads import select

    task = find_task(str(ROOT / agent.TASK))
    of = [[row.id for row in select(task.workloads, list(step.rows))] for step in agent.STEPS if step.rows]
    assert sorted(of[0] + of[1]) == sorted(row.id for row in task.workloads)
