"""Workers are forked from a process that has imported torch: each is a process of its own, as if started alone."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core.judge.tests.processes import is_running, until
from kda_judge.arms import fork_server
from kda_judge.arms.arm_process import ArmProcess, Fault
from kda_judge.arms.protocol import ArmSpec, Ready
from kda_judge.contract.task_import import import_path
from kda_judge.evidence.run_record import Verdict


@pytest.fixture
def start(toy):
    """Starts an arm with variables of its own; all end with the test."""
    arms = []

    def start(**extra):
        arms.append(ArmProcess(ArmSpec(name="one", folder=str(toy.path), module="solution", device="cpu"), 20, extra))
        arms[-1].start()
        arms[-1].hello()
        return arms[-1]

    yield start
    for arm in arms:
        arm.stop()


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def variables(server):
    return dict(line.split("=", 1) for line in Path(f"/proc/{server}/environ").read_text().split("\0") if "=" in line)


def test_workers_share_a_server_and_no_process(start):
    first, second = start(), start()
    assert first.pid != second.pid
    assert parent(first.pid) == parent(second.pid) != os.getpid()
    assert os.getsid(first.pid) != os.getsid(second.pid)


def test_another_environment_or_folder_is_another_server(start, toy, monkeypatch):
    first = parent(start().pid)
    second = parent(start(KDA_TEST="1").pid)
    monkeypatch.chdir(toy.path)
    third = parent(start().pid)
    assert len({first, second, third}) == 3
    assert variables(second)["KDA_TEST"] == "1"
    assert Path(f"/proc/{third}/cwd").resolve() == toy.path.resolve()
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in variables(first)


def test_a_server_that_was_begun_earlier_is_the_one_that_forks(start, monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    fork_server.begin({"KDA_TEST": "begun"})
    *_, begun = fork_server._servers.values()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # as torch does when it first uses a GPU
    assert parent(start(KDA_TEST="begun").pid) == begun._process.pid


def test_a_server_that_is_of_no_more_use_ends(start):
    arm = start()
    old = parent(arm.pid)
    arm.stop()
    start(KDA_TEST="2")
    assert not is_running(old)


def test_workers_end_with_their_server_and_the_next_arm_gets_another(start):
    arm = start()
    server = parent(arm.pid)
    os.kill(server, signal.SIGKILL)
    assert until(lambda: not arm.alive)
    with pytest.raises(Fault, match="was killed by SIGKILL"):
        arm.ask("pin", Ready, core=None)
    assert parent(start().pid) != server


def test_a_server_that_cannot_begin_is_a_fault_with_what_it_printed(toy, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('half an installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arm = ArmProcess(ArmSpec(name="one", folder=str(toy.path), module="solution", device="cpu"), 20, {})
    with pytest.raises(Fault, match="half an installation") as raised:
        arm.start()
    assert raised.value.verdict is Verdict.ERROR
    assert arm.pid is None


def test_an_interrupted_question_ends_the_server(start, monkeypatch):
    """Its answer would be taken for the next question's."""
    arm = start()
    (one,) = [server for server in fork_server._servers.values() if server._process.pid == parent(arm.pid)]

    def interrupted(*_):
        raise KeyboardInterrupt

    with tempfile.TemporaryFile() as log, monkeypatch.context() as patched:
        patched.setattr(fork_server.socket, "send_fds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.fork("{}", log.fileno(), log.fileno())
    assert not one.alive
    assert until(lambda: not arm.alive)


def test_the_server_asks_nothing_about_a_gpu() -> None:
    """Once torch has counted GPUs, what is forked cannot use them."""
    code = """
import socket, sys, torch
torch.version.cuda = "13.0"
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, lambda *_, name=name: sys.exit(f"asked for {name}"))
judge, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
judge.close()
from kda_judge.arms import fork_server
fork_server.main([str(server.detach())])
"""
    env = {**os.environ, "PYTHONPATH": import_path()}
    env.pop("CUDA_VISIBLE_DEVICES", None)  # where it names no GPU, the server imports less
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
