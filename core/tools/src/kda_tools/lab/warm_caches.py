"""Fills the compilers' caches on disk, so that a run compiles nothing: all arms but `eager` call all rows, in parallel.

A run compiles row by row, since nothing may disturb what is timed; here as many processes compile as there are cores.
Code that a compiler keeps only in memory, as the CuTe DSL does, is compiled again by every worker.
`python -m kda_tools.lab.warm_caches TASK ROW...` fills the caches for the limits' streams of these rows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from functools import partial
from itertools import cycle

from kda_judge.arms.process_tree import trees
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import find_task
from kda_judge.evidence.run_record import LIMIT_ARM
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_judge.session import EAGER, Session, arm_spec, frozen_rows
from kda_tools.lab.inspect.arm_alone import STARTER, Job, end_with_starter
from kda_tools.lab.inspect.cuda_tools import Ran, run_below, run_tool, visits

ROWS_EACH = 6
"""Rows of one process; importing an arm takes as long as compiling one row."""
JOB_S = 180.0
"""Time limit of one process in seconds: a build takes a minute or two, and a hang must not use up a lent GPU's time."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_S = 0.2
"""Seconds between two looks for processes that must end."""


def fill(sessions: Sequence[Session], processes: int, show: Callable[[str], None]) -> int:
    """Call every arm of the sessions but `eager` on every row, `processes` at a time; returns how many failed.

    `show` gets a line for every process that has ended. If an arm refuses a row, its process calls no further rows.
    An interrupt ends all processes.
    """
    gpus = cycle(_gpus())  # every process needs a context, and one GPU gives them one after the other
    jobs = [job for work in (_streams, _calls) for session in sessions for job in work(session, gpus)]
    failed = 0
    names: dict[Future[Ran], str] = {}
    with ThreadPoolExecutor(processes) as pool:
        try:
            for name, work in jobs:
                names[pool.submit(work)] = name
            for number, future in enumerate(as_completed(names), start=1):
                wrong = _wrong(future)
                failed += bool(wrong)
                show(f"[{number}/{len(jobs)}] {names[future]}{wrong}")
        except BaseException:
            _end(names)
            raise
    return failed


def _wrong(ended: Future[Ran]) -> str:
    """How a process failed; empty if it did not."""
    try:
        ran = ended.result()
    except MissingRequirement as error:  # it took too long
        return f": {error}"
    return f": exit code {ran.code}{ran.tail}" if ran.code else ""


def _end(futures: Collection[Future[Ran]]) -> None:
    """Drop what waits and end what runs, also if more interrupts come: `timeout -s INT` may send two."""
    try:
        running = [future for future in futures if not future.cancel()]
        while wait(running, POLL_S).not_done:
            _end_started()
    except KeyboardInterrupt:
        _end(futures)


def _end_started() -> None:
    """End the processes below this one that are in other sessions. By SIGTERM: a killed supervisor ends nothing."""
    for process in trees([os.getpid()])[os.getpid()]:
        with suppress(OSError):
            if os.getsid(process) != os.getsid(0):
                os.kill(process, signal.SIGTERM)


def _gpus() -> list[dict[str, str]]:
    """For each visible GPU, the environment in which a process sees it alone."""
    import torch

    count, chosen = torch.cuda.device_count(), os.environ.get(VISIBLE)
    names = [str(number) for number in range(count)] if chosen is None else chosen.split(",")[:count]
    return [{VISIBLE: name} for name in names] or [{}]


def _streams(session: Session, gpus: Iterator[dict[str, str]]) -> Iterator[tuple[str, Callable[[], Ran]]]:
    """One process for all the limits' streams, with its name: most compile the same code, which two would do twice."""
    op = session.request.task.op
    words = [sys.executable, "-m", "kda_tools.lab.warm_caches", op, *(row.id for row in frozen_rows(session))]
    environment = {"PYTHONPATH": import_path(), **_starter(), **next(gpus)}
    yield f"{op}, {LIMIT_ARM}", partial(run_tool, words, environment, JOB_S)


def _calls(session: Session, gpus: Iterator[dict[str, str]]) -> Iterator[tuple[str, Callable[[], Ran]]]:
    """The processes for the arms' calls, with their names."""
    op, rows = session.request.task.op, frozen_rows(session)
    for name in session.arms:
        if name == EAGER:  # PyTorch's own operations: it compiles nothing
            continue
        spec = arm_spec(session, name)
        for start in range(0, len(rows), ROWS_EACH):
            chosen = rows[start : start + ROWS_EACH]
            job = Job(arm=spec, visits=visits(session, chosen), order=(0,), draw_on=session.device)
            called = partial(run_below, [], session, job, _starter() | next(gpus), JOB_S)
            yield f"{op}, {name}: {chosen[0].id} and {len(chosen) - 1} more", called


def _starter() -> dict[str, str]:
    return {STARTER: str(os.getpid())}


def main(op: str, *ids: str) -> None:
    """Launch every stream of the limits' worker once, for each of these rows."""
    import torch

    from kda_judge.arms.limit_arm import all_streams

    task = find_task(op)
    reference = load_reference(task)
    for row in task.workloads:
        if row.id in ids:
            moved = traffic(task.config.ops[row.op], row, reference)
            for stream in all_streams(moved):
                stream()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    end_with_starter()
    main(*sys.argv[1:])
