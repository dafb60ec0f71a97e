"""Decide whether runs beside loaded neighbours on a host can be published, from what a fleet measured of the walls."""

from math import log

from kda_judge.evidence import stats
from kda_judge.evidence.run_record import SharedHost

MARK = "shared-host"
"""Begins the reason why a run beside disturbing neighbours is not published."""


def disturbed(shared: SharedHost) -> str | None:
    """Why runs beside these neighbours cannot be published, or None."""
    if not shared.rows:
        return f"{MARK}: {shared.neighbours} neighbours worked at the time, and what they do to walls was not measured"
    for row, found in shared.rows.items():
        alone, beside = (stats.speedup(part.first, part.second) for part in (found.alone, found.beside))
        floor = max(abs(log(alone.low)), abs(log(alone.high)))
        if abs(log(beside.estimate)) > floor:
            return (
                f"{MARK}: walls of {row} are {1 / beside.estimate:.3f} times as long beside {shared.neighbours} loaded "
                f"neighbours as beside idle ones; by themselves they reach {alone.low:.3f} to {alone.high:.3f}"
            )
    return None
