"""The process that watches the GPU during a run, at less than a hundredth of a core.

`python -m kda_judge.evidence.gpu_sampler JUDGE_PID GPU` reads NVML until its standard input ends, then writes a
`MachineWatch` as JSON.
It is a process because a thread would hold the judge's interpreter lock at moments when the judge looks at its clock,
and it waits for standard input because that ends with the judge, however the judge ends.
"""

import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from kda_judge.evidence.gpu_state import GpuProcess, GpuState, read_state
from kda_judge.evidence.run_record import MachineWatch, Spread, WatchedProcess

PERIOD_S = 0.2
"""Seconds between two readings, unless `CORE_SHARE` asks for more: as long as twenty samples of 10 ms."""
CORE_SHARE = 0.01
"""Most of one core that the watcher uses: after a reading that took long it rests longer."""
LONGEST_REST_S = 5.0
"""Longest rest, however long a reading took: a run unwatched for `gpu_watch.LONGEST_GAP_S` cannot be published."""


@dataclass(frozen=True)
class Reading:
    """One look at the GPU; `state.processes` are those that are not the run's."""

    at_s: float
    state: GpuState


def main() -> None:
    """Watch until standard input ends."""
    import pynvml

    judge, gpu = map(int, sys.argv[1:])
    _leave_the_timed_core()
    read_state(gpu)  # a GPU that cannot be read ends the watcher here, with a message
    pynvml.nvmlInit()  # held open: opening NVML costs more than a reading
    own: set[int] = set()
    readings: list[Reading] = []
    began = time.process_time()
    while True:
        before = time.process_time()
        readings.append(_read(judge, own, gpu))
        rest = min(LONGEST_REST_S, max(PERIOD_S, (time.process_time() - before) / CORE_SHARE))
        if select.select([sys.stdin], [], [], rest)[0]:
            break
    sys.stdout.write(summarise(readings, time.process_time() - began).model_dump_json())


def summarise(readings: Sequence[Reading], cpu_s: float) -> MachineWatch:
    """The readings of a run, in the order taken; at least one."""
    gaps = [0.0, *(after.at_s - one.at_s for one, after in pairwise(readings))]
    busy = [reading.state for reading in readings if "gpu_idle" not in reading.state.throttle]
    throttle_s: dict[str, float] = {}
    held: dict[int, list[GpuProcess]] = {}
    for reading, gap in zip(readings, gaps, strict=True):
        for reason in reading.state.throttle:
            throttle_s[reason] = throttle_s.get(reason, 0.0) + gap
        for process in reading.state.processes:
            held.setdefault(process.pid, []).append(process)
    return MachineWatch(
        readings=len(readings),
        busy=len(busy),
        seconds=readings[-1].at_s - readings[0].at_s,
        longest_gap_s=max(gaps),
        cpu_s=cpu_s,
        sm_mhz=_spread([state.sm_mhz for state in busy]),
        memory_mhz=_spread([state.memory_mhz for state in busy]),
        power_w=_spread([state.power_w for state in busy]),
        temperature_c=_spread([reading.state.temperature_c for reading in readings]),
        throttle_s=throttle_s,
        foreign=tuple(
            WatchedProcess(
                pid=pid,
                readings=len(seen),
                memory_mb=max((one.memory_mb for one in seen if one.memory_mb is not None), default=None),
            )
            for pid, seen in sorted(held.items())
        ),
    )


def _leave_the_timed_core() -> None:
    """Workers are pinned to the last core while timing."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, cores - {max(cores)})


def _read(judge: int, own: set[int], gpu: int) -> Reading:
    """One reading; `own` collects every pid of the run, because a worker that ended may be listed a moment longer."""
    living = _tree(judge) - {os.getpid()}
    own |= living
    state = read_state(gpu, living)
    foreign = tuple(p for p in state.processes if p.pid not in own and not _descends(p.pid, judge))
    return Reading(time.monotonic(), state.model_copy(update={"processes": foreign}))


def _tree(pid: int) -> set[int]:
    """The process and all below it that main threads started: workers are some levels down."""
    return {pid}.union(*map(_tree, _children(pid)))


def _children(pid: int) -> set[int]:
    """Processes that this one's main thread started; none where the kernel does not list them."""
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))
    except OSError:
        return set()


def _descends(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is the process itself, its parent, or one further up; False for a process not visible here."""
    while pid > 1 and pid != ancestor:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        # The name in parentheses may hold anything; the parent's pid is the second field behind it.
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == ancestor


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [float(value) for value in values if value is not None]
    return Spread(low=min(known), median=median(known), high=max(known)) if known else None


if __name__ == "__main__":
    main()
