"""What several test files share: a small real task in a temporary checkout, and a stub of the CUDA driver."""

import shutil
import signal

import pytest

from core.tests.adversaries.suite import place
from core.tests.stub_cuda import Stub
from kda_core.provenance import COMMIT_VARIABLE, DIRTY_VARIABLE
from kda_core.tasks import Task


def listen_to_interrupts() -> None:
    """For Popen's preexec_fn: a shell that runs the tests in the background starts them with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one task, `toys/k90_axpy`; `kda` finds it from the current folder."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "pyproject.toml").touch()
    (tmp_path / "noxfile.py").touch()
    place(tmp_path)
    for name in ("KDA_ROOT", COMMIT_VARIABLE, DIRTY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy(checkout):
    """The temporary checkout's task, under an import name that no other test used."""
    folder = checkout / f"toys_{checkout.name.replace('-', '_')}" / "k90_axpy"
    shutil.move(checkout / "toys" / "k90_axpy", folder)
    return Task(path=folder, package=f"{folder.parent.name}.k90_axpy")


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """A driver that writes down what reaches it, with a folder of its own."""
    return Stub(tmp_path_factory.mktemp("stub"))
