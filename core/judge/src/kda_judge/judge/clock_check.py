"""Whether an arm's clock runs slow: the judge's clock over long loops, against what the worker claims for them.

What a command costs beside its calls is the same for short loops and long ones. So where a sample's loop takes the
judge longer than the worker claims, by more than short loops do, much longer loops decide: of them the cost is next to
nothing, and only time that was not claimed grows with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median

from kda_judge.arms.protocol import Timed
from kda_judge.evidence.run_record import Metric

SHAVED = 0.015
"""Share of a loop's time that may be missing from the claim. List and events of a long loop cost up to half of it."""
LONGER, LONG_US = 6, 120_000
"""Such a loop makes at least so many times the calls of a sample, and lasts so long: what the host does in between
differs by a millisecond. An honest arm that is suspect all the same makes one loop a generation."""
LOOPS = 5
"""All of which have to take longer than claimed: on a busy host the judge may come late, but not each time."""
LATE = 0.1
"""Share of a loop's time that a busy host may be late by. The loop behind such a one is twice as long, so that a few
milliseconds are ever less of it. More than that an arm has shaved, and longer loops would only take longer."""
LEAST_US = 1_000
"""Of shorter samples the clock says nothing. A CPU makes one call, of which nothing is kept."""


def claimed_us(timed: Timed, metric: Metric) -> float:
    """What the worker says that the calls took: for `device` the time between the events around the replays.

    Graphs back to back fill the host's time for them, but for what a sample's few commands cost.
    """
    return timed.events_us if metric is Metric.DEVICE and timed.events_us else timed.total_us


def longer(claimed_us: Sequence[float]) -> int:
    """How many times the calls of a sample such a loop makes, by what was claimed for the samples' loops."""
    return max(LONGER, ceil(LONG_US / median(claimed_us)))


def suspect(long_us: Sequence[float], short_us: float, claimed_us: Sequence[float], lasting: bool = False) -> bool:
    """Whether longer loops have to decide.

    Args:
        long_us: time by the judge's clock less the claim, of each sample's loop.
        short_us: the same of short loops.
        claimed_us: what was claimed for the sample's loops.
        lasting: whether honest samples are long enough for a clock. Then short ones are the arm's doing.
    """
    claimed = median(claimed_us)
    if claimed < LEAST_US:
        return lasting
    return median(long_us) - short_us > SHAVED * claimed
