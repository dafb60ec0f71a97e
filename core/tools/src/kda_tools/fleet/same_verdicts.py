"""Whether a bench on several GPUs says what one on a single GPU says: verdict and speedups of each row."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import find_task
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_tools.fleet.fleet_record import FleetRecord
from kda_tools.fleet.run_folder import moment_of
from kda_tools.lab.compare_runs import compare
from kda_tools.publish.report import recorded

Found = dict[tuple[str, str], tuple[RunRecord, Verdict]]
"""(op, row) -> the run that has it, and its verdict there."""


def count_agreeing_rows(alone: FleetRecord, several: FleetRecord) -> tuple[int, int]:
    """Of how many rows both runs say the same, and how many rows they have.

    The same: an equal verdict, and no speedup that has moved (`compare_runs`).
    """
    old, new = _rows(alone), _rows(several)
    moved: dict[tuple[str, str], set[str]] = {}
    agree = 0
    for place in old.keys() & new.keys():
        (one, was), (other, now) = old[place], new[place]
        pair = (one.run_id, other.run_id)
        if pair not in moved:
            moved[pair] = {change.row for change in compare(one, other).changes if change.outside_margin}
        agree += was == now and place[1] not in moved[pair]
    return agree, len(old.keys() | new.keys())


def _rows(fleet: FleetRecord) -> Found:
    begin = moment_of(fleet.utc).replace(microsecond=0)
    end = begin + timedelta(seconds=fleet.ready_s + fleet.work_s + 1)
    found: Found = {}
    for op in fleet.names:
        for run in _runs(op):
            moment = moment_of(run.utc)
            if run.command == fleet.command and begin <= moment <= end:
                found |= {(op, row.id): (run, row.verdict) for row in run.rows}
    return found


def _runs(op: str) -> Iterator[RunRecord]:
    try:
        yield from recorded(find_task(op))
    except UsageError:  # the task has gone since
        return
