"""Keep the other arms idle while one is timed. An arm that works all the same makes its row INVALID."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from kda_judge.arms.arm_process import ArmProcess, Fault, processes
from kda_judge.arms.process_tree import cpu_s, quick_trees, stopped
from kda_judge.evidence.run_record import Verdict
from kda_judge.judge.row_notes import ArmNotes

IDLE_SHARE = 0.1
"""Share of a processor that an arm may use while the others are timed; a worker that waits uses nothing."""
IDLE_LEAST_S = 0.05
"""Seconds: shares of a shorter time are not judged."""
ROUNDS = 20
"""Most rounds of looking for processes to hold: a held process starts no other, but may have done so just before."""
SETTLE_S = 0.1
"""Most seconds to wait until processes have stopped: a thread may still be running on another core."""


@contextmanager
def alone(asked: str, arms: Mapping[str, ArmProcess]) -> Iterator[Mapping[str, list[int]]]:
    """Hold all processes that the other arms started, and yield every arm's. Supervisors go on, to end their trees."""
    held, found = set[int](), processes(arms, quick_trees)
    try:
        for _ in range(ROUNDS):
            others = {process for name, tree in found.items() if name != asked for process in tree[1:]} - held
            if not others:
                break
            held |= others
            _send(others, signal.SIGSTOP)
            until = time.monotonic() + SETTLE_S
            while not all(map(stopped, others)) and time.monotonic() < until:
                time.sleep(SETTLE_S / 1000)
            found = processes(arms, quick_trees)
        _send(found.get(asked, ()), signal.SIGCONT)  # another arm may have stopped it
        yield found
    finally:
        _send(held, signal.SIGCONT)


def _send(to: Iterable[int], number: signal.Signals) -> None:
    for process in to:
        with suppress(ProcessLookupError):
            os.kill(process, number)


@contextmanager
def watched(
    asked: str, arms: Mapping[str, ArmProcess], notes: Mapping[str, ArmNotes], core: int | None
) -> Iterator[None]:
    """While arm `asked` is timed, hold the others and note the processor time that they use all the same.

    No arm's priority or scheduling policy may have changed, and `asked` has to run on the core that it was pinned to.
    """
    with alone(asked, arms) as held:
        before = {name: cpu_s(tree) for name, tree in held.items()}
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            for name, tree in processes(arms, quick_trees).items():
                if name != asked and name in before:
                    notes[name].idle_s += elapsed
                    notes[name].idle_cpu_s += max(0.0, cpu_s(tree) - before[name])
                changed = _changed(tree[:2], core if name == asked else None)
                if changed is not None:
                    fault = Fault(Verdict.INVALID, f"the {changed} of arm {name!r} was changed")
                    notes[name].fault = notes[name].fault or fault


def _changed(pair: Sequence[int], core: int | None) -> str | None:
    """What differs from how the judge left a supervisor and its worker: priority, policy, or the worker's `core`."""
    with suppress(ProcessLookupError):
        for process in pair:
            if os.getpriority(os.PRIO_PROCESS, process) != os.getpriority(os.PRIO_PROCESS, 0):
                return "priority"
            if os.sched_getscheduler(process) != os.sched_getscheduler(0):
                return "scheduling policy"
        if core is not None and len(pair) == 2 and os.sched_getaffinity(pair[1]) != {core}:
            return "affinity"
    return None


def busy(name: str, arm: ArmNotes) -> Fault | None:
    """The fault of an arm that kept a processor busy while others were timed."""
    if arm.idle_s < IDLE_LEAST_S or arm.idle_cpu_s <= IDLE_SHARE * arm.idle_s:
        return None
    share = arm.idle_cpu_s / arm.idle_s
    return Fault(Verdict.INVALID, f"arm {name!r} kept {share:.0%} of a processor busy while others were timed")
