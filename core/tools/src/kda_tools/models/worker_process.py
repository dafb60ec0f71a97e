"""Run worker processes: each reads a JSON request, waits for its turn, works, and writes a JSON answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kda_judge.contract import errors
from kda_judge.contract.errors import ArmFailed, KdaError
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.task_import import import_path

PHASE = "kda phase: "
"""Begins a line on a worker's standard error that names what it does next."""
CAUSE = re.compile(r"^(\[rank0\]: )?[\w.]*(Error|Exception)\b")
"""The last line of a traceback."""


class WorkerRequest(Strict):
    """What one worker shall do."""

    model: str


class WorkerAnswer(Strict):
    """The result of a worker; only `error` and `kind` are set if it failed."""

    error: str | None = None
    kind: str | None = None
    """Name of the error's class in `kda_judge.contract.errors`."""


Asked = TypeVar("Asked", bound=WorkerRequest)
Found = TypeVar("Found", bound=WorkerAnswer)


def answers_of(
    worker: str,
    answer: type[Found],
    requests: Sequence[WorkerRequest],
    show: Callable[[str], None] = lambda _: None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Found]:
    """The answers of `python -m WORKER` in fresh processes.

    All workers import at the same time, which takes longest, and then work one by one. `show` gets each phase's name.

    Raises:
        KdaError: the error of a worker, with its class and message; ArmFailed if a worker died.
    """
    with tempfile.TemporaryDirectory(prefix="kda-model-") as folder, ExitStack() as running:
        started = [
            running.enter_context(_started(worker, one, Path(folder) / str(i), env or {}))
            for i, one in enumerate(requests)
        ]
        for number, (request, process) in enumerate(zip(requests, started, strict=True)):
            stderr = b"".join(_read_stderr(process, partial(_shown, show, f"process {number + 1} of {len(requests)}")))
            file = Path(folder) / f"{number}.answer.json"
            if not file.is_file():
                raise ArmFailed(f"{request.model}: its worker ended with {process.returncode}: {causes(stderr)}")
            found = answer.model_validate_json(file.read_bytes())
            if found.error is not None:
                raise getattr(errors, found.kind or "ArmFailed")(found.error)
            yield found


def work(request: type[Asked], answer: type[Found], do: Callable[[Asked], Found]) -> None:
    """A worker's main function: write the answer of `do`, or its error, to the file; the exit status shows no error."""
    try:
        found = do(request.model_validate_json(Path(sys.argv[1]).read_bytes()))
    except KdaError as error:
        found = answer(error=str(error), kind=type(error).__name__)
    Path(sys.argv[2]).write_text(found.model_dump_json(), encoding="utf-8")


def await_turn() -> None:
    """In a worker: return when its turn has come."""
    if not sys.stdin.readline():
        sys.exit("the process that started this one has ended")


def tell(phase: str) -> None:
    """In a worker: name its next phase to the process that started it."""
    print(f"{PHASE}{phase}", file=sys.stderr, flush=True)


def causes(stderr: bytes) -> str:
    """The last lines that a dead process wrote; before them its first error, as later errors may follow from it."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    first = [line for line in lines[:-3] if CAUSE.search(line)][:1]
    return " | ".join([*first, *lines[-3:]])


def _shown(show: Callable[[str], None], who: str, phase: str) -> None:
    show(f"{who}: {phase}")


def _read_stderr(worker: subprocess.Popen[bytes], show: Callable[[str], None]) -> Iterator[bytes]:
    """Let a worker have its turn, to its end; the lines of its standard error that are no phases."""
    assert worker.stdin is not None
    assert worker.stderr is not None
    with suppress(BrokenPipeError):  # it ended before its turn
        os.write(worker.stdin.fileno(), b"\n")
    for line in worker.stderr:
        if line.startswith(PHASE.encode()):
            show(line.decode().strip().removeprefix(PHASE))
        else:
            yield line
    worker.wait()


@contextmanager
def _started(
    name: str, request: WorkerRequest, path: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that imports and then waits for its turn; it ends with the block."""
    question, answer = path.with_suffix(".request.json"), path.with_suffix(".answer.json")
    question.write_text(request.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", name, str(question), str(answer)]
    everything = {**os.environ, "PYTHONPATH": import_path(), **env}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=everything, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as worker:
        try:
            yield worker
        finally:
            worker.kill()
