"""What the other arms do while one is timed: nothing, or their row is INVALID."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kda_core.notes import ArmNotes
from kda_core.records import Verdict
from kda_core.workers import ArmProcess, Fault

IDLE_SHARE = 0.1
"""Of a processor, that an arm may use while the others are timed; a worker that waits for a command uses nothing."""
IDLE_LEAST_S = 0.05
"""Shares of less time than this are not judged."""


@contextmanager
def watched(asked: str, arms: Mapping[str, ArmProcess], notes: Mapping[str, ArmNotes]) -> Iterator[None]:
    """While arm `asked` is timed, note what the others use of a processor; none may have lost its priority."""
    others = {name: arm for name, arm in arms.items() if name != asked and arm.alive}
    before, begin = {name: arm.cpu_s() for name, arm in others.items()}, time.perf_counter()
    try:
        yield
    finally:
        for name, arm in others.items():
            notes[name].idle_s += time.perf_counter() - begin
            notes[name].idle_cpu_s += max(0.0, arm.cpu_s() - before[name])
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for name, arm in arms.items():
        if arm.pid is not None and arm.alive and os.getpriority(os.PRIO_PROCESS, arm.pid) != mine:
            fault = Fault(Verdict.INVALID, f"the priority of arm {name!r} was changed")
            notes[name].fault = notes[name].fault or fault


def busy(name: str, arm: ArmNotes) -> Fault | None:
    """The fault of an arm that kept a processor busy while others were timed."""
    if arm.idle_s < IDLE_LEAST_S or arm.idle_cpu_s <= IDLE_SHARE * arm.idle_s:
        return None
    share = arm.idle_cpu_s / arm.idle_s
    return Fault(Verdict.INVALID, f"arm {name!r} kept {share:.0%} of a processor busy while others were timed")
