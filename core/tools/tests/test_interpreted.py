"""What Triton's interpreter runs: it has to be chosen before Triton is imported, hence processes of their own."""

import os
import subprocess
import sys

import pytest
import torch

from core.tools.tests.every_task import ROOT, every_task

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs these tests")


def interpret(*tests, options=()):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, tests)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


@every_task
def test_kernels_of(task):
    """Every eighth case. `nox -s tests-ptx` runs all cases as compiled code, in a third of the time."""
    interpret(task.path / "tests" / "test_kernel.py", options=("-p", "core.tools.tests.every_eighth"))


def test_calls_that_take_a_kernel():
    interpret(f"{ROOT / 'core' / 'tools' / 'tests' / 'test_conformance.py'}::test_why_not_agrees_with_what_runs")
