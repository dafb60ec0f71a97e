"""What the other arms do while one is timed: nothing, or their row is INVALID."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kda_judge.arms.arm_process import ArmProcess, Fault, processes
from kda_judge.arms.process_tree import cpu_s
from kda_judge.evidence.run_record import Verdict
from kda_judge.judge.row_notes import ArmNotes

IDLE_SHARE = 0.1
"""Of a processor, that an arm may use while the others are timed; a worker that waits for a command uses nothing."""
IDLE_LEAST_S = 0.05
"""Shares of less time than this are not judged."""


@contextmanager
def watched(asked: str, arms: Mapping[str, ArmProcess], notes: Mapping[str, ArmNotes]) -> Iterator[None]:
    """While arm `asked` is timed, note what the others use of a processor; none may have lost its priority."""
    before = {name: cpu_s(tree) for name, tree in processes(arms).items()}
    begin = time.perf_counter()
    try:
        yield
    finally:
        elapsed, mine = time.perf_counter() - begin, os.getpriority(os.PRIO_PROCESS, 0)
        for name, tree in processes(arms).items():
            if name != asked and name in before:
                notes[name].idle_s += elapsed
                notes[name].idle_cpu_s += max(0.0, cpu_s(tree) - before[name])
            if any(_priority(process, mine) != mine for process in tree[:2]):  # the supervisor and its worker
                fault = Fault(Verdict.INVALID, f"the priority of arm {name!r} was changed")
                notes[name].fault = notes[name].fault or fault


def _priority(process: int, gone: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, process)
    except ProcessLookupError:
        return gone


def busy(name: str, arm: ArmNotes) -> Fault | None:
    """The fault of an arm that kept a processor busy while others were timed."""
    if arm.idle_s < IDLE_LEAST_S or arm.idle_cpu_s <= IDLE_SHARE * arm.idle_s:
        return None
    share = arm.idle_cpu_s / arm.idle_s
    return Fault(Verdict.INVALID, f"arm {name!r} kept {share:.0%} of a processor busy while others were timed")
