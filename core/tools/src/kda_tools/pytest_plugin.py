"""Pytest plugin for the tests of all tasks: skips tests that cannot run here, and clears cached plans between tests."""

import os
from importlib.util import find_spec

import pytest

KERNEL_TESTS = "test_kernel.py"
"""File name of a task's tests of its kernels, on a GPU or in an interpreter."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `gpu`; if Triton's interpreter runs kernels, make it convert numbers as a GPU does."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does

        convert_as_a_gpu_does()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, skip tests marked `gpu`, and tests of kernels unless Triton interprets the kernels."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    kernels = [item for item in items if item.path.name == KERNEL_TESTS]
    if not (marked or kernels) or _has_gpu():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in kernels:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def _fresh_plans(request: pytest.FixtureRequest) -> None:
    """Clear the plans that a task's solution has cached in an earlier test."""
    solution = request.path.parents[1] / "solution"
    if solution.is_dir():
        from kda_runtime.tuned_table import forget_plans

        forget_plans(solution)


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
