"""A worker's whole process tree ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.judge.tests.processes import is_running, until
from kda_judge.arms import process_tree
from kda_judge.arms.arm_process import ArmProcess, Fault, processes
from kda_judge.arms.process_tree import cpu_s, quick_trees, trees
from kda_judge.arms.protocol import ArmSpec, Ready
from kda_judge.contract.task_import import import_path
from kda_judge.evidence.run_record import Verdict

DAEMON = """
import os, pathlib
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path({pid!r}).write_text(str(os.getpid()))
        os.execlp("sleep", "sleep", "98")
    os._exit(0)
"""
JUDGE = """
import sys, time
from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.protocol import ArmSpec
arm = ArmProcess(ArmSpec.model_validate_json(sys.argv[1]), 20, {})
arm.start()
arm.hello()
print("ready", flush=True)
time.sleep(99)
"""


@pytest.fixture
def daemon(toy, tmp_path):
    """The spec of an arm that starts a daemon when it is imported, and the file that will hold the daemon's id."""
    file = tmp_path / "pid"
    source = DAEMON.format(pid=str(file)) + "def axpy(x, y, *, factor):\n    os._exit(3)\n"
    (toy.path / "faulty" / "arm.py").write_text(source)
    yield ArmSpec(name="arm", folder=str(toy.path), module="faulty.arm", device="cpu"), file
    if file.exists() and is_running(int(file.read_text())):
        os.kill(int(file.read_text()), signal.SIGKILL)


def started(spec):
    arm = ArmProcess(spec, 20, {})
    arm.start()
    arm.hello()
    return arm


def pid_in(file):
    assert until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


@pytest.mark.parametrize("end", ["stop", "killed", "stopped"])
def test_a_daemon_ends_with_its_worker(daemon, end):
    spec, file = daemon
    arm = started(spec)
    child = pid_in(file)
    assert is_running(child)
    supervisor, worker, *rest = processes({"arm": arm})["arm"]
    assert child in rest
    if end == "killed":
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(Fault, match="was killed by SIGKILL during 'close'"):
            arm.ask("close", Ready)
    if end == "stopped":
        os.kill(supervisor, signal.SIGSTOP)
    arm.stop()
    assert not any(map(is_running, (supervisor, worker, child)))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_ends_with_the_judge(daemon, by):
    spec, file = daemon
    with subprocess.Popen(
        [sys.executable, "-c", JUDGE, spec.model_dump_json()],
        env={**os.environ, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
        text=True,
    ) as judge:
        assert judge.stdout.readline() == "ready\n"
        child = pid_in(file)
        assert is_running(child)
        judge.send_signal(by)
        assert until(lambda: not is_running(child), seconds=5)


def test_what_left_the_session_is_named(daemon):
    spec, file = daemon
    arm = started(spec)
    try:
        pid_in(file)
        assert until(lambda: "sleep 98" in str(arm.strays()), seconds=5)
        fault = arm.strays()
    finally:
        arm.stop()
    assert (fault.verdict, str(fault)) == (
        Verdict.INVALID,
        "arm 'arm' left processes running in a session of their own: sleep 98",
    )
    assert arm.strays() is None


def test_the_time_of_a_tree_is_that_of_all_its_processes():
    spin = "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-S", "-c", spin], start_new_session=True) as parent:
        try:
            assert until(lambda: len(trees([parent.pid])[parent.pid]) == 2)
            time.sleep(0.5)
            tree = trees([parent.pid])[parent.pid]
            assert tree[0] == parent.pid
            assert cpu_s(tree) > cpu_s(tree[:1]) + 0.05
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert until(lambda: cpu_s(tree) == 0)
    assert trees([parent.pid]) == {parent.pid: [parent.pid]}


def commands(pids):
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if is_running(pid)]
    return sorted(line.replace(b"\0", b" ").strip() for line in lines)


@pytest.mark.parametrize("look", [trees, quick_trees])
def test_what_a_thread_has_started_and_what_its_own_child_left_behind_are_in_the_tree(look):
    """A shell that ends leaves its child to the subreaper."""
    code = """
import ctypes, subprocess, threading, time
ctypes.CDLL(None).prctl(36, 1)
started = threading.Thread(target=lambda: [subprocess.Popen(["sleep", "97"]), time.sleep(99)], daemon=True)
started.start()
subprocess.run("sleep 98 & exec true", shell=True)
print("ready", flush=True)
time.sleep(99)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "ready\n"
            assert until(lambda: commands(look([parent.pid])[parent.pid][1:]) == [b"sleep 97", b"sleep 98"], seconds=9)
            first, *below = look([parent.pid, os.getpid()])[parent.pid]
            assert first == parent.pid
            assert below == sorted(below)
            assert parent.pid in look([os.getpid()])[os.getpid()]
        finally:
            for one in trees([parent.pid])[parent.pid]:
                os.kill(one, signal.SIGKILL)
    assert look([parent.pid]) == {parent.pid: [parent.pid]}


def test_who_is_stopped():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not process_tree.stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        assert until(lambda: process_tree.stopped(child.pid))
        child.kill()
    assert process_tree.stopped(child.pid), "a process that is gone does nothing any more"


def test_a_kernel_without_lists_of_children_is_looked_through(monkeypatch):
    with subprocess.Popen(["sleep", "97"]) as child:
        try:
            monkeypatch.setattr(process_tree, "CHILDREN", "nowhere")
            assert child.pid in quick_trees([os.getpid()])[os.getpid()]
        finally:
            child.kill()
