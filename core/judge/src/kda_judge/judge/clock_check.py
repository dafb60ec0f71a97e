"""Find arms whose clock runs slow: compare the judge's clock over long loops with the worker's claims.

A command costs the same besides its calls, whether its loop is short or long. If a sample's loop takes longer by the
judge's clock than the worker claims, by more than short loops do, much longer loops decide. There the fixed cost is
next to nothing, and only time that was not claimed grows with the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median

from kda_judge.arms.protocol import Timed
from kda_judge.evidence.run_record import Metric

SHAVED = 0.015
"""Share of a loop's time that a claim may lack. A long loop's list of calls and its events cost up to half of it."""
LONGER, LONG_US = 6, 120_000
"""A long loop makes at least this many times the calls of a sample, and lasts at least this many microseconds, since
the host's own work differs by a millisecond. An honest arm that is suspect all the same makes one loop a generation."""
LOOPS = 5
"""Number of long loops. All have to take longer than claimed: on a busy host the judge may be late, but not always."""
LATE = 0.1
"""Share of a loop's time by which a busy host may be late. The next loop is then twice as long, so that a few
milliseconds become a smaller share. A larger share was hidden by the arm, and longer loops would not change it."""
LEAST_US = 1_000
"""Shortest sample, in microseconds, that the clock can check. On a CPU a sample is one call, whose time is not kept."""


def claimed_us(timed: Timed, metric: Metric) -> float:
    """What the worker claims that the calls took: for `device` the time between the events around the replays.

    Replays back to back fill the host's time, except for the cost of a sample's few commands.
    """
    return timed.events_us if metric is Metric.DEVICE and timed.events_us else timed.total_us


def longer(claimed_us: Sequence[float]) -> int:
    """How many times the calls of a sample a long loop makes, from the claims for the samples' loops."""
    return max(LONGER, ceil(LONG_US / median(claimed_us)))


def suspect(long_us: Sequence[float], short_us: float, claimed_us: Sequence[float], lasting: bool = False) -> bool:
    """Whether longer loops have to decide.

    Args:
        long_us: time by the judge's clock less the claim, of each sample's loop.
        short_us: the same of short loops.
        claimed_us: what was claimed for the sample's loops.
        lasting: whether honest samples are long enough for the clock. If so, the arm has shortened the short ones.
    """
    claimed = median(claimed_us)
    if claimed < LEAST_US:
        return lasting
    return median(long_us) - short_us > SHAVED * claimed
