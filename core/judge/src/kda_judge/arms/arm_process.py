"""The judge's handle on an arm: start its process, send it commands, and turn every failure into a `Fault`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kda_judge.arms.fork_server import Forked, fork
from kda_judge.arms.process_tree import detached, trees
from kda_judge.arms.protocol import (
    ArmFailure,
    ArmSpec,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    Ready,
    Reply,
    Timed,
)
from kda_judge.evidence.run_record import Verdict

Look = Callable[[Iterable[int]], Mapping[int, list[int]]]
"""A function that finds all processes below each of the given ones."""
REFUSALS = ("ValueError:", "TypeError:", "AssertionError:", "NotImplementedError:")
"""First words of errors that are about the arguments. CUDA's are RuntimeErrors, and make the worker useless."""
LOG_TAIL = 12
"""Lines of an arm's own output that an error message carries."""
TAIL_BYTES = 1 << 16
"""How many bytes are read, from the end of that output: an arm may have made the file of any length."""
START_TIMEOUT_S = 180.0
"""Seconds to import an arm, torch and a CUDA context included."""
STOP_S = 60.0
"""Seconds for a supervisor to end its worker's tree, in which the driver may be freeing memory, before it is killed."""


class Fault(Exception):
    """An arm failed: the verdict that follows, and the reason in words."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason


class Refusal(Fault):
    """An arm raised an error which says that it does not support such a call; its worker goes on."""


class ArmProcess:
    """One arm's worker. Start, `ask`, and after a fault `start` again."""

    def __init__(
        self,
        spec: ArmSpec,
        timeout_s: float,
        environment: dict[str, str],
        answered: Callable[[str, float], None] = lambda _command, _begin: None,
    ):
        """`answered` is called with every command that has ended, and the time when it began."""
        self.spec = spec
        self._answered = answered
        self._timeout_s = timeout_s
        self._environment = environment
        self._process: Forked | None = None
        self._channel: Channel | None = None
        self._log: Any = None

    @property
    def alive(self) -> bool:
        """Whether the process runs and was not given up on."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the worker's supervisor while there is one."""
        return self._process.pid if self._process is not None else None

    def strays(self) -> Fault | None:
        """The fault of an arm that started processes in a session of their own which still run."""
        found = [command for tree in processes({"": self}).values() for command in detached(tree)]
        if not found:
            return None
        text = f"left processes running in a session of their own: {'; '.join(found)}"
        return Fault(Verdict.INVALID, f"arm {self.spec.name!r} {text}")

    def start(self) -> None:
        """Start the process without waiting for its imports; `hello` waits."""
        begin = time.perf_counter()
        self.stop()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        with theirs:
            try:
                spec = self.spec.model_dump_json()
                self._process = fork(self._environment, spec, theirs.fileno(), self._log.fileno())
            except OSError as error:
                raise self.give_up(Verdict.ERROR, f"could not be started: {error}") from None
        self._answered("start", begin)

    def hello(self, posted: bool = False) -> None:
        """Wait until the arm is imported."""
        self.ask("hello", Ready, START_TIMEOUT_S, posted=posted)

    def post(self, command: str, **arguments: Any) -> None:
        """Send a command, so that several arms work on it at once; `ask` with `posted` waits for the answer."""
        with suppress(ChannelClosed):  # `ask` finds that out when it waits
            if self._channel is not None:
                self._channel.post(command, **arguments)

    def ask(
        self,
        command: str,
        reply: type[Reply],
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        refusable: bool = False,
        posted: bool = False,
        **arguments: Any,
    ) -> tuple[Reply, float]:
        """One command: the parsed reply and the seconds it took by the judge's clock. Raises Fault.

        A worker that claims more time than passed is INVALID. `meanwhile` is called while the worker works. With
        `refusable` an error of `REFUSALS` is a Refusal.
        """
        if self._channel is None:
            raise Fault(Verdict.ERROR, f"arm {self.spec.name!r} is not running")
        begin = time.perf_counter()
        try:
            answer, elapsed = self._channel.ask(
                command, reply, timeout_s or self._timeout_s, meanwhile, posted, **arguments
            )
        except ArmFailure as failure:
            where = _arm_frame(failure.failure.traceback)
            if refusable and str(failure).startswith(REFUSALS):
                raise Refusal(Verdict.ERROR, f"arm {self.spec.name!r} raised {failure}{where}") from None
            raise self.give_up(Verdict.ERROR, f"raised {failure}{where}") from None
        except ChannelTimeout as error:
            raise self.give_up(Verdict.TIMEOUT, f"{error} to {command!r}") from None
        except ChannelError as error:
            raise self.give_up(Verdict.ERROR, f"wrote garbage on the judge's channel: {error}") from None
        except ChannelClosed:
            raise self.give_up(Verdict.ERROR, f"{self._ending()} during {command!r}{self._tail()}") from None
        finally:
            self._answered(command, begin)
        if isinstance(answer, Timed) and answer.total_us > elapsed * 1e6:
            raise self.give_up(Verdict.INVALID, f"{command}: claims more time than passed")
        return answer, elapsed

    def end(self) -> None:
        """Tell the process to end, without waiting: several arms end side by side. `stop` waits."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # the arm may have stopped it

    def stop(self) -> None:
        """Kill the process and everything it started; safe to call twice."""
        self.end()
        if self._process is not None:
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def give_up(self, verdict: Verdict, text: str) -> Fault:
        """End the worker, whose state is unknown after a fault, and put the fault into words."""
        self.stop()
        return Fault(verdict, f"arm {self.spec.name!r} {text}")

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its channel but went on running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = self._log.read(TAIL_BYTES).strip(b"\0").decode(errors="replace").strip().splitlines()
        shown = [line for line in lines if not line.startswith("frame #")]  # of C++, after the message
        return "".join(f"\n    | {line}" for line in shown[-LOG_TAIL:])


def processes(arms: Mapping[str, ArmProcess], look: Look = trees) -> dict[str, list[int]]:
    """For each arm that is alive, the pids of its supervisor, of its worker, and of all that these have started."""
    roots = {name: arm.pid for name, arm in arms.items() if arm.alive and arm.pid is not None}
    found = look(roots.values())
    return {name: found[root] for name, root in roots.items()}


def _arm_frame(traceback: str) -> str:
    """Where the arm raised: the last file and line of the traceback."""
    frames = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    file, _, rest = frames[-1].removeprefix('File "').partition('"')
    return f" ({Path(file).name}{rest})"
