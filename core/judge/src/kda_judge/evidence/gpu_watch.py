"""The GPU watched all through a run: start the watching process, and say what its readings mean for the run.

The readings before and after a run, which `bench.py` takes, miss what comes and goes in between: a neighbour's job, a
clock that heat pulled down for a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

from pydantic import ValidationError

from kda_judge.contract.task_import import import_path
from kda_judge.evidence.derive import rounded
from kda_judge.evidence.gpu_state import DISTURBING, LOW_CLOCK, GpuState
from kda_judge.evidence.run_record import MachineWatch, RunRecord

FOREIGN_READINGS = 3
"""A foreign process that is in fewer readings does not count: a worker that has just ended can still be listed, under a
pid that no process has any more."""
NAMED = 3
"""How many foreign processes are named, those with the most readings; the others are only counted."""
LONGEST_GAP_S = 10.0
"""A run that was unwatched for longer may have been disturbed: a row's samples take about as long."""
ANSWER_S = 10.0
"""Seconds for the watcher to sum up its readings, 3000 after ten minutes."""


def completed(record: RunRecord, seen: MachineWatch | str) -> RunRecord:
    """The record with what the watcher saw. If `seen` is text, it says why it saw nothing; the run is then noisy."""
    if isinstance(seen, str):
        reason = f"during: the GPU was not watched: {seen}"
        return record.model_copy(update={"noisy": (*record.noisy, reason)})
    reasons = noise(seen, record.machine.before)
    return rounded(record.model_copy(update={"machine_watch": seen, "noisy": (*record.noisy, *reasons)}))


def noise(watch: MachineWatch, before: GpuState | None) -> list[str]:
    """Reasons why times of the run may not be the kernels' own; empty for a quiet run.

    `gpu_state.noise` already names the processes that held the GPU `before`.
    """
    reasons = []
    known = {process.pid for process in before.processes} if before else set()
    held = [p for p in watch.foreign if p.readings >= FOREIGN_READINGS and p.pid not in known]
    held.sort(key=lambda process: -process.readings)
    for process in held[:NAMED]:
        memory = "" if process.memory_mb is None else f" ({process.memory_mb} MiB)"
        seen = f"in {process.readings} of {watch.readings} readings"
        reasons.append(f"during: the GPU was held by pid {process.pid}{memory} {seen}")
    if held[NAMED:]:
        reasons.append(f"during: the GPU was held by {len(held) - NAMED} more processes in as many readings or fewer")
    for reason in sorted(DISTURBING & watch.throttle_s.keys()):
        reasons.append(f"during: clocks throttled by {reason} for {watch.throttle_s[reason]:.1f} s")
    if watch.sm_mhz and before and before.sm_max_mhz and watch.sm_mhz.median < LOW_CLOCK * before.sm_max_mhz:
        share = watch.sm_mhz.median / before.sm_max_mhz
        reasons.append(
            f"during: median SM clock {watch.sm_mhz.median:.0f} MHz is {share:.0%} of {before.sm_max_mhz} MHz"
        )
    if watch.longest_gap_s > LONGEST_GAP_S:
        reasons.append(f"during: the GPU was not watched for {watch.longest_gap_s:.0f} s")
    return reasons


class Watcher:
    """The watching process, from the judge's side; a context manager that never leaves it behind."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu

    def __enter__(self) -> Watcher:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kda_judge.evidence.gpu_sampler", str(os.getpid()), str(self._gpu)],
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the judge alone
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def finish(self) -> MachineWatch | str:
        """End the watching. Returns what was seen, or a text that says why nothing was."""
        try:
            out, err = self._process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            return f"the watcher did not answer within {ANSWER_S:.0f} s"
        if self._process.returncode != 0:
            output = err.decode(errors="replace").strip().splitlines()
            return f"the watcher ended with {self._process.returncode}: {output[-1] if output else 'no message'}"
        try:
            return MachineWatch.model_validate_json(out)
        except ValidationError as problem:
            return f"the watcher's answer is not what was expected: {problem.errors()[0]['msg']}"
