"""A pytest plugin that runs all of the tasks' own kernel tests on the machine, with kernels compiled for sm_90a.

python -m pytest -p kda_tools.lab.ptx.plugin diffusion/*/tests/test_kernel.py
"""

from collections.abc import Iterator

import pytest

from kda_judge.contract.tasks import Task
from kda_tools.lab.ptx.kernels import on_the_machine
from kda_tools.pytest_plugin import KERNEL_TESTS


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the marks that skip kernel tests if there is neither a GPU nor the interpreter."""
    for item in items:
        if item.path.name == KERNEL_TESTS and not item.get_closest_marker("gpu"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(autouse=True)
def _on_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the test's task launch on the machine."""
    folder = next(folder for folder in request.path.parents if (folder / "config.toml").is_file())
    with on_the_machine(Task(folder)):
        yield
