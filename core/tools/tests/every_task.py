"""The tasks of this checkout, for tests that every one of them has to pass: a new task gets them for nothing."""

from pathlib import Path

import pytest

from kda_judge.contract.tasks import Task

ROOT = Path(__file__).resolve().parents[3]
TASKS = [Task(config.parent) for config in sorted(ROOT.glob("*/*/config.toml"))]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.op)
