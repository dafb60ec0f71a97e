"""Whether a bench on several GPUs says what one on a single GPU says: verdict and speedups of each row."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import find_task
from kda_judge.evidence.run_record import RunRecord
from kda_tools.fleet.fleet_record import FleetRecord
from kda_tools.lab.compare_runs import compare
from kda_tools.publish.report import recorded

Found = dict[tuple[str, str], RunRecord]
"""(op, row) -> the run that has it."""


def agreeing(alone: FleetRecord, several: FleetRecord) -> tuple[int, int]:
    """Of how many rows both runs say the same, and how many rows they have.

    The same: an equal verdict, and no speedup that has moved (`compare_runs`).
    """
    old, new = _rows(alone), _rows(several)
    agree = [place for place in old.keys() & new.keys() if _agree(old[place], new[place], place[1])]
    return len(agree), len(old.keys() | new.keys())


def _rows(fleet: FleetRecord) -> Found:
    begin = datetime.fromisoformat(fleet.utc.replace("Z", "+00:00")).replace(microsecond=0)
    end = begin + timedelta(seconds=fleet.ready_s + fleet.work_s + 1)
    found: Found = {}
    for op in fleet.names:
        for run in _runs(op):
            moment = datetime.fromisoformat(run.utc.replace("Z", "+00:00"))
            if run.command == fleet.command and begin <= moment <= end:
                found |= {(op, row.id): run for row in run.rows}
    return found


def _runs(op: str) -> Iterator[RunRecord]:
    try:
        yield from recorded(find_task(op))
    except UsageError:  # the task has gone since
        return


def _agree(old: RunRecord, new: RunRecord, row: str) -> bool:
    verdicts = {one.verdict for run in (old, new) for one in run.rows if one.id == row}
    return len(verdicts) == 1 and not any(change.moved for change in compare(old, new).changes if change.row == row)
