"""Fill the compilers' caches on disk, so that a run compiles nothing: every arm calls every row once, side by side.

A run compiles row by row, since nothing may disturb what is timed; here as many processes compile as there are cores.
What compilers keep in memory alone, as the CuTe DSL does, every worker makes again.
Started as `python -m kda_tools.lab.warm_caches TASK ROW...` it does that for the limits' streams of these rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import find_task
from kda_judge.evidence.run_record import LIMIT_ARM
from kda_judge.judge.open_row import traffic
from kda_judge.judge.oracle import load_reference
from kda_judge.session import Session, arm_spec, frozen_rows
from kda_tools.lab.inspect.arm_alone import Job
from kda_tools.lab.inspect.cuda_tools import Ran, run_below, run_tool, visits

ROWS_EACH = 6
"""Of a process: importing an arm takes as long as compiling one row."""


def fill(sessions: Sequence[Session], processes: int, show: Callable[[str], None]) -> int:
    """Call every arm of the sessions on every row, in so many processes; how many of them failed.

    `show` is told of every process that has ended. An arm that refuses a row leaves the rows behind it in its process.
    """
    jobs = [job for work in (_streams, _calls) for session in sessions for job in work(session)]
    failed = 0
    with ThreadPoolExecutor(processes) as pool:
        names = {pool.submit(work): name for name, work in jobs}
        for number, future in enumerate(as_completed(names), start=1):
            ran = future.result()
            failed += ran.code != 0
            show(f"[{number}/{len(jobs)}] {names[future]}" + (f": exit code {ran.code}{ran.tail}" if ran.code else ""))
    return failed


def _streams(session: Session) -> Iterator[tuple[str, Callable[[], Ran]]]:
    """The process for the limits' streams, with a name: most compile the same, so that two would do it twice."""
    op = session.request.task.op
    words = [sys.executable, "-m", "kda_tools.lab.warm_caches", op, *(row.id for row in frozen_rows(session))]
    yield f"{op}, {LIMIT_ARM}", partial(run_tool, words, {"PYTHONPATH": import_path()})


def _calls(session: Session) -> Iterator[tuple[str, Callable[[], Ran]]]:
    """The processes for the arms' calls, with their names."""
    op, rows = session.request.task.op, frozen_rows(session)
    for name in session.arms:
        spec = arm_spec(session, name)
        for start in range(0, len(rows), ROWS_EACH):
            chosen = rows[start : start + ROWS_EACH]
            job = Job(arm=spec, visits=visits(session, chosen), order=(0,), draw_on=session.device)
            yield f"{op}, {name}: {chosen[0].id} and {len(chosen) - 1} more", partial(run_below, [], session, job, {})


def main(op: str, *ids: str) -> None:
    """Launch every stream of the limits' worker once, for each of these rows."""
    import torch

    from kda_judge.arms.limit_arm import all_streams

    task = find_task(op)
    reference = load_reference(task)
    for row in task.workloads:
        if row.id in ids:
            moved = traffic(task.config.ops[row.op], row, reference)
            for stream in all_streams(moved, in_place=bool(row.inplace)):
                stream()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
