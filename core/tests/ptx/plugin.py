"""A pytest plugin: the tasks' own kernel tests, their whole envelope, with the kernels as compiled for sm_90a.

python -m pytest -p core.tests.ptx.plugin diffusion/*/tests/test_kernel.py
"""

from collections.abc import Iterator

import pytest

from conftest import KERNEL_TESTS
from core.tests.every_task import TASKS
from core.tests.ptx.kernels import on_the_machine


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take back that kernels are skipped where neither a GPU nor the interpreter runs them."""
    for item in items:
        if item.path.name == KERNEL_TESTS and not item.get_closest_marker("gpu"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(autouse=True)
def _on_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the test's task launch on the machine."""
    (task,) = (task for task in TASKS if request.path.is_relative_to(task.path))
    with on_the_machine(task):
        yield
