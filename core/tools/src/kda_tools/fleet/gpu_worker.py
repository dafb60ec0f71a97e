"""The actor that holds one GPU, or one share of a CPU, and runs one process a question.

It goes to the nodes by value and needs the standard library alone: kda is imported by the processes that it starts,
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

SAID = 6
"""Last lines of a process's output that are told when it ends without an answer."""
ACTOR = "KDA_FLEET_ACTOR"
"""Environment variable: pid of the actor, with which its process ends."""


class GpuWorker:
    """One process at a time; `interrupt` comes in beside a `run` that is going on."""

    def __init__(self, command: list[str], environment: dict[str, str], sources: list[str]) -> None:
        """`sources` count from the folder that Ray has unpacked, where the actor starts; none: nothing was."""
        brought = [str(Path(source).resolve()) for source in sources]
        path = os.pathsep.join([*brought, *filter(None, [environment.get("PYTHONPATH")])])
        root = {"KDA_ROOT": str(Path.cwd())} if sources else {}
        self._command = [sys.executable, *command]
        self._environment = {**os.environ, **root, **environment, "PYTHONPATH": path, ACTOR: str(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None

    def pid(self) -> int:
        """Of the actor; that it answers says that it is up."""
        return os.getpid()

    def run(self, question: str) -> str:
        """The answer of a fresh process to a question, both as JSON; for one that died, how it did."""
        # Neither file has a name, so that nothing of them stays when the actor is killed.
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [*self._command, str(answer.fileno())],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[answer.fileno()],
                start_new_session=True,  # Ctrl-C reaches the driver alone, which then asks for `interrupt`
            )
            self._process.communicate(question.encode())
            answer.seek(0)
            if (text := answer.read().decode()).endswith("\n"):  # else it died before or while it wrote
                return text
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()[-SAID:]
            code = self._process.returncode
            return json.dumps({"failed": f"the process ended with {code}: {' | '.join(lines) or 'no output'}"})

    def interrupt(self) -> None:
        """What Ctrl-C is to a command."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
