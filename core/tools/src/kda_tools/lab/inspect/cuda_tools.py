"""Runs an arm under one of the CUDA toolkit's tools: finds the tool, starts the arm below it, tells how both ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kda_judge.arms.arm_process import STOP_S
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.workloads import Workload
from kda_judge.session import Session
from kda_tools.lab.inspect.arm_alone import Job, Visit

FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute/*")
"""Where the toolkit's tools lie when they are not on PATH, shell patterns; CUDA_HOME/bin comes before these."""
TIMEOUT_S = 1800.0
"""Longest run of a tool. It includes upstream's JIT builds and every row, at up to 100 times their usual duration."""
TAIL = 20
"""Lines of output that an error message carries."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    output: str
    """Standard output and error together."""
    done: tuple[str, ...]
    """Ids of the rows whose calls all ended."""

    @property
    def tail(self) -> str:
        """The end of the output, indented for an error message."""
        return "".join(f"\n    | {line}" for line in self.output.strip().splitlines()[-TAIL:])


def find(name: str, remedy: str) -> Path:
    """The tool's executable.

    Raises:
        MissingRequirement: it was not found; the message names the places searched, and `remedy`.
    """
    home = os.environ.get("CUDA_HOME")
    patterns = [*([f"{home}/bin"] if home else []), *FOLDERS]
    folders = [str(found) for pattern in patterns for found in sorted(_folders(pattern), reverse=True)]
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if path is None:
        raise MissingRequirement(f"{name}: not found on PATH nor in {', '.join(patterns)}. {remedy}")
    return Path(path)


def _folders(pattern: str) -> list[Path]:
    parent, _, last = pattern.rpartition("/")
    return list(Path(parent or "/").glob(last)) if Path(parent or "/").is_dir() else []


def version(tool: Path) -> str:
    """The version that `TOOL --version` prints, for example 2025.3.1.0; `unknown` if it prints none."""
    answer = run_tool([str(tool), "--version"], {}, timeout_s=60.0)
    number = re.search(r"[Vv]ersion (\d[\d.]*\d)", answer.output)
    return number[1] if number else "unknown"


def visits(session: Session, rows: Sequence[Workload]) -> tuple[Visit, ...]:
    """`rows` in the form that the arm's process takes."""
    ops = session.config.ops
    return tuple(Visit(row=row, inputs=ops[row.op].inputs, by_name=ops[row.op].by_name) for row in rows)


def run_below(
    command: Sequence[str], session: Session, job: Job, environment: dict[str, str], timeout_s: float = TIMEOUT_S
) -> Ran:
    """Run `command` with the job's process as its last arguments."""
    env = {"PYTHONPATH": import_path(), **environment}
    if session.kind == "cpu":
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="kda-") as folder:
        order, done = Path(folder) / "job.json", Path(folder) / "done"
        order.write_text(job.model_dump_json(), encoding="utf-8")
        done.touch()
        words = [*command, sys.executable, "-m", "kda_tools.lab.inspect.arm_alone", str(order), str(done)]
        ran = run_tool(words, env, timeout_s)
        return Ran(ran.code, ran.output, tuple(done.read_text(encoding="utf-8").splitlines()))


def run_tool(command: Sequence[str], environment: dict[str, str], timeout_s: float = TIMEOUT_S) -> Ran:
    """Run a command to its end, in a session of its own so that its children never outlive it.

    Raises:
        MissingRequirement: it cannot be started, or does not end in time.
    """
    name = Path(command[0]).name
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MissingRequirement(f"{name}: cannot be started: {error}") from None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MissingRequirement(
                f"{name}: no end after {timeout_s:.0f} s; run it on fewer rows, and look whether the GPU is free"
            ) from None
        finally:
            process.terminate()  # a supervisor then ends all below it, also what left its group
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return Ran(code, log.read().decode(errors="replace"), ())
