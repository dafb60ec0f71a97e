"""A process that has imported torch once, and forks a worker for each arm that is started.

The import takes more than a second of processor time, a fork some milliseconds. The server imports no arm and touches
no GPU, so a worker inherits only libraries that it, or an upstream's arm, would import itself. Python's own forkserver
is not used: it imports the caller's main module into every child.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from kda_judge.contract.task_import import import_path

MESSAGE_BYTES = 1 << 16
START_S = 180.0
"""Seconds for the server to import torch and to answer. Later forks take milliseconds."""
NOT_PASSED = {"PYTEST_CURRENT_TEST"}
"""Variables that workers do not get: an arm need not know which test runs, and the value changes all the time."""
SET_BY_TORCH = {"CUDA_MODULE_LOADING": "LAZY"}
"""torch puts this into the judge's own environment when it first uses a GPU. Servers get it from the start, so that a
server that was started before this still has the right environment."""
ROOM = 512
"""Bytes reserved at the end of the server's command line, which a worker overwrites with its own."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Folder and environment: what a worker inherits."""


class Forked:
    """A process that the server has forked, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._descriptor = os.pidfd_open(pid)  # the pid is not used again before the server asks for the status

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._descriptor, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            self.returncode = self._server.status(self.pid)
            os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The judge's handle on one server. Judges may run in several threads; only one at a time talks to the server."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._log: Any = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kda_judge.arms.fork_server", str(theirs.fileno()), " " * ROOM],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C reaches the judge alone.
            start_new_session=True,
        )
        theirs.close()

    def fork(self, spec: str, channel: int, log: int) -> Forked:
        """See the module's function of this name."""
        pid = int(self._ask(spec.encode(), [channel, log]))
        self._running.add(pid)
        return Forked(self, pid)

    def status(self, pid: int) -> int:
        """The exit code of a process that has ended. If the server has ended, the process was killed with it."""
        self._running.discard(pid)
        try:
            return os.waitstatus_to_exitcode(int(self._ask(str(pid).encode(), [])))
        except OSError:
            return -signal.SIGKILL

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def idle(self) -> bool:
        """Whether none of its workers is known to run."""
        return not self._running

    def stop(self) -> None:
        """End the server; workers that still run end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, message: bytes, descriptors: list[int]) -> bytes:
        with self._lock:
            try:
                socket.send_fds(self._socket, [message], descriptors)
                if answer := self._socket.recv(MESSAGE_BYTES):
                    return answer
                raise ConnectionResetError
            except BaseException as error:
                self.stop()  # otherwise, after Ctrl-C, a late answer would pass for the next question's
                if isinstance(error, OSError):
                    raise OSError(f"the process that forks workers has ended: {self._output() or error}") from None
                raise

    def _output(self) -> str:
        self._log.seek(0)
        return str(self._log.read().decode(errors="replace")).strip()


_servers: dict[Key, ForkServer] = {}
_lock = threading.Lock()


def fork(extra: dict[str, str], spec: str, channel: int, log: int) -> Forked:
    """A worker for the arm of `spec`, in this folder, with this process's environment and the variables `extra`.

    `channel` and `log` are the descriptors of its end of the judge's socket pair and of the file that it prints to. The
    server stays, and forks later workers too.

    Raises:
        OSError: the server has ended or does not answer.
    """
    with _lock:
        return _server(extra).fork(spec, channel, log)


def begin(extra: dict[str, str]) -> None:
    """Start the server that will fork workers with the variables `extra`: it imports torch while the judge does."""
    with _lock:
        _server(extra)


def _server(extra: dict[str, str]) -> ForkServer:
    # Workers write no bytecode: if some lies beside an arm's source after the run, it was put there on purpose.
    own = {"PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1"}
    variables = {**SET_BY_TORCH, **os.environ, **extra, **own}
    environment = {key: value for key, value in variables.items() if key not in NOT_PASSED}
    key = (str(Path.cwd()), tuple(sorted(environment.items())))
    if key not in _servers or not _servers[key].alive:
        for other in [other for other, one in _servers.items() if one.idle or not one.alive]:
            _servers.pop(other).stop()
        _servers[key] = ForkServer(environment)
    return _servers[key]


@atexit.register
def _stop() -> None:
    for one in _servers.values():
        one.stop()


def serve(channel: socket.socket) -> tuple[int, str]:
    """Fork and wait as the judge asks. Returns only in a child: the worker's end of its socket pair, and its spec."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            sys.exit()  # the judge has ended
        if not descriptors:
            channel.send(str(os.waitpid(int(message), 0)[1]).encode())
            continue
        worker, log = descriptors
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            return worker, message.decode()
        channel.send(str(pid).encode())
        os.close(worker)
        os.close(log)


def _name(command: str) -> None:
    """Have `ps` and the like show this command line: proc(5), arg_start and arg_end in /proc/self/stat."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, command.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main(arguments: list[str]) -> None:
    """Entry point of the server, and of every worker."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        # Upstream's arms, which run on a GPU alone, have decorators that import this. It takes seconds.
        import torch._dynamo  # noqa: F401

    from kda_judge.arms import arm_worker, clocks, output_guards  # noqa: F401  # they import torch, for all workers

    gc.freeze()  # so that these pages stay shared when a worker collects garbage
    worker, spec = serve(socket.socket(fileno=int(arguments[0])))
    sys.argv = ["kda_judge.arms.arm_worker", str(worker), spec]  # as if the worker had been started directly
    _name(" ".join([sys.executable, "-m", *sys.argv]))
    arm_worker.main(worker, spec)


if __name__ == "__main__":
    main(sys.argv[1:])
