"""Write new values into the inputs while a timed loop runs, and check that its last output follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from math import ceil
from statistics import median
from typing import Any

from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.input_values import Family
from kda_judge.arms.protocol import Called, Timed
from kda_judge.evidence.run_record import Metric, Verdict
from kda_judge.judge.checker import Checker
from kda_judge.judge.open_row import Case
from kda_judge.judge.row_notes import ArmNotes, RowNotes

REPLACED_LOOP_US = 50_000
"""Least microseconds of a loop whose inputs are replaced: writing them takes some milliseconds."""
REPLACED_CALLS = (16, 4**10)
"""Least and most calls of such a loop. Nothing is tried where four calls take longer than `REPLACED_LOOP_US`. The row's
samples decide that, because in these loops an arm could be slow on purpose."""
REPLACED_LONGEST_S = 1.0
"""Seconds by the judge's clock. Shorter loops are doubled where the judge was too late, so that a wait of the host
matters less."""
SHORT_CLAIM = 1 / 2
"""Share of the time that passed: a loop that claims less cannot be judged. An honest one claims less only where the
judge waited as long as the whole loop took."""
REPLACE_TRIALS = 9
REPLACE_WRONG = 3
"""Wrong trials of one kind that fail an arm, or two if none was right: in a single one, a call may have been late."""


def replace_under_way(checker: Checker, case: Case, notes: RowNotes, arm: ArmNotes, process: ArmProcess) -> None:
    """Write new values into the inputs while a timed loop runs: its last output must follow from them.

    Every other time only a part of them is new, so that an arm cannot notice the change by comparing a few elements.
    A call that reads while they change may return anything, so only the last call is judged, and only if it started
    after the change. If that is impossible because the arm claims far less time than passed, the row is INVALID. If
    the judge was too late, the loop gets longer. The record says how many loops counted.
    """
    usual_us = median(chain(*arm.samples[Metric.WALL]))
    if usual_us > REPLACED_LOOP_US / 4:
        return
    count, elapsed = _long_loop(process, usual_us)
    right, wrong, short = {True: 0, False: 0}, dict[bool, list[str]]({True: [], False: []}), 0
    for trial in range(REPLACE_TRIALS):
        # All of the inputs and a part of them in turn; once one kind was right, only the other is tried.
        whole = trial % 2 == 1 if bool(right[True]) == bool(right[False]) else not right[True]
        old, before = checker.draw(case, notes, Family.NORMAL, checker.seed())
        checker.remember(case, before)
        new, expected = checker.draw(case, notes, Family.NORMAL, checker.seed()) if whole else checker.redraw(case, old)
        checker.write(case, old)
        written = [0.0]

        def replace(new: Any = new, written: list[float] = written, pause_s: float = elapsed / 4) -> None:
            time.sleep(pause_s)
            case.replace(new)
            written[0] = time.perf_counter()

        begin = time.perf_counter()
        claimed, elapsed = _loop(process, count, replace)
        called, _ = process.ask("collect", Called)
        # The loop ended `claimed` after `begin`, or later, and its last eighth holds two calls or more.
        if written[0] < begin + 7 / 8 * claimed:
            failure = checker.compare(case, called, new, expected, Family.NORMAL, which=0).failure
            right[whole] += failure is None
            wrong[whole] += [failure] if failure else []
        else:
            # Where the judge was late by its own clock too, the reply waited for the judge, so the clock says nothing.
            short += claimed < elapsed * SHORT_CLAIM and written[0] < begin + 7 / 8 * elapsed
            if elapsed < REPLACED_LONGEST_S and count < REPLACED_CALLS[1]:
                count, elapsed = 2 * count, 2 * elapsed
        arm.replaced = sum(right.values()) + sum(map(len, wrong.values()))
        if all(right.values()) or max(map(len, wrong.values())) == REPLACE_WRONG:
            break
    for kind, failures in wrong.items():
        if len(failures) == REPLACE_WRONG or (len(failures) > 1 and not right[kind]):
            arm.incorrect = f"{failures[0]}; the inputs were replaced while a loop of calls was running"
            return
    if short > REPLACE_TRIALS / 2:
        raise process.give_up(
            Verdict.INVALID, f"claims less than half of the time that passed in {short} of {REPLACE_TRIALS} loops"
        )


def _long_loop(process: ArmProcess, usual_us: float) -> tuple[int, float]:
    """Calls of a loop that claims to last long enough to replace inputs, and its seconds by the judge's clock."""
    least, most = REPLACED_CALLS
    count = min(max(least, ceil(REPLACED_LOOP_US / usual_us)), most)
    claimed, elapsed = _loop(process, count)
    while claimed * 1e6 < REPLACED_LOOP_US and count < most:
        count = min(2 * count, most)
        claimed, elapsed = _loop(process, count)
    return count, elapsed


def _loop(process: ArmProcess, count: int, meanwhile: Callable[[], None] | None = None) -> tuple[float, float]:
    """Seconds of one timed loop, as the worker claims and by the judge's clock."""
    timed, elapsed = process.ask("wall", Timed, count=count, canary=None, meanwhile=meanwhile)
    return timed.total_us / 1e6, elapsed
