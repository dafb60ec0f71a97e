"""What several test files share: a stub of the CUDA driver."""

import pytest

from core.runtime.tests.stub_cuda import Stub


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """A driver that writes down what reaches it, with a folder of its own."""
    return Stub(tmp_path_factory.mktemp("stub"))
