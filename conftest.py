"""What all tests share: which of them run on this machine, and that none meets launch plans of another."""

import os
from importlib.util import find_spec

import pytest

KERNEL_TESTS = "test_kernel.py"
"""A task's tests of its kernels, on whatever runs them."""


def pytest_configure() -> None:
    """Let Triton's interpreter, where it runs kernels, convert as a GPU does."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from kda_core.interpreter import convert_as_a_gpu_does

        convert_as_a_gpu_does()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, skip what is marked `gpu`, and kernels unless Triton interprets them."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    kernels = [item for item in items if item.path.name == KERNEL_TESTS]
    if not (marked or kernels) or _has_gpu():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "needs a GPU, or TRITON_INTERPRET=1 as core/tests/test_interpreted.py sets it"
        for item in kernels:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_plans(request: pytest.FixtureRequest) -> None:
    """Forget what a task's solution remembers of the test before."""
    solution = request.path.parents[1] / "solution"
    if solution.is_dir():
        from kda_core.tuning import forget_plans

        forget_plans(solution)


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
