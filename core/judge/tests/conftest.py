"""What several test files share: a small real task in a temporary checkout."""

import shutil
import signal
from pathlib import Path

import pytest

from kda_judge.contract.tasks import Task
from kda_judge.evidence.provenance import COMMIT_VARIABLE, DIRTY_VARIABLE

ADVERSARIES = Path(__file__).parents[2] / "tools" / "src" / "kda_tools" / "lab" / "adversaries"
"""Of kda-tools, whose files are copied: nothing is imported."""
NOTHING_COMPILED = shutil.ignore_patterns("__pycache__")


def listen_to_interrupts() -> None:
    """For Popen's preexec_fn: a shell may start tests in the background without SIGINT, and nohup without SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one task, `toys/k90_axpy`; `kda` finds it from the current folder."""
    (tmp_path / "core").mkdir()
    (tmp_path / "noxfile.py").touch()
    shutil.copytree(ADVERSARIES / "toy", tmp_path / "toys" / "k90_axpy", ignore=NOTHING_COMPILED)
    for name in ("KDA_ROOT", COMMIT_VARIABLE, DIRTY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy(checkout):
    """The temporary checkout's task, with arms that cheat or fail in `faulty/`."""
    task = Task(checkout / "toys" / "k90_axpy")
    shutil.copytree(ADVERSARIES / "arms", task.path / "faulty", ignore=NOTHING_COMPILED)
    return task
