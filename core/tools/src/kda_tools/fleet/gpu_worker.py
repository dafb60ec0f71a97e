"""The actor that holds one GPU, or one share of a CPU, and starts one process per question.

Its code goes to the nodes by value, so it needs the standard library alone. The processes that it starts import kda
from the checkout that the runtime environment brought.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

LAST_LINES = 6
"""Number of last output lines that are reported when a process ends without an answer."""
ACTOR = "KDA_FLEET_ACTOR"
"""Environment variable with the pid of the actor; a process ends when its actor does."""


Begun = tuple["subprocess.Popen[bytes]", IO[bytes], IO[bytes]]
"""A process, the file for its answer, and the file with its output."""


class GpuWorker:
    """Runs one process at a time, while the next one imports; `interrupt` may be called during a `run`."""

    def __init__(self, command: list[str], environment: dict[str, str], sources: list[str]) -> None:
        """`sources` are relative to the folder that Ray unpacked, where the actor starts; empty if it unpacked none."""
        brought = [str(Path(source).resolve()) for source in sources]
        path = os.pathsep.join([*brought, *filter(None, [environment.get("PYTHONPATH")])])
        root = {"KDA_ROOT": str(Path.cwd())} if sources else {}
        self._command = [sys.executable, *command]
        self._environment = {**os.environ, **root, **environment, "PYTHONPATH": path, ACTOR: str(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None
        self._next: Begun | None = None

    def pid(self) -> int:
        """Pid of the actor; an answer shows that the actor is up."""
        return os.getpid()

    def run(self, question: str) -> str:
        """The answer of a fresh process to a question, both as JSON. If the process dies, the answer says how.

        The process was started during the question before, since its imports take seconds.
        """
        begun, self._next = self._next, None
        if begun is None or begun[0].poll() is not None:
            begun = self._begin()
        self._next = self._begin()
        self._process, answer, output = begun
        with answer, output:
            self._process.communicate(question.encode())
            answer.seek(0)
            if (text := answer.read().decode()).endswith("\n"):  # else it died before or while it wrote
                return text
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
            code = self._process.returncode
            return json.dumps({"failed": f"the process ended with {code}: {' | '.join(lines) or 'no output'}"})

    def _begin(self) -> Begun:
        """Start a process, which waits for its question. Its files have no names: nothing remains of a killed actor."""
        answer, output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # `run` closes them
        process = subprocess.Popen(
            [*self._command, str(answer.fileno())],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[answer.fileno()],
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then asks for `interrupt`
        )
        return process, answer, output

    def interrupt(self) -> None:
        """Send SIGINT to the process, as Ctrl-C does to a command."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
