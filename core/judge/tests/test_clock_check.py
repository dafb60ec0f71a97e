"""Which samples make longer loops decide, and that the protocol's cost does not."""

from types import SimpleNamespace

import pytest

from kda_judge import bench
from kda_judge.arms.arm_process import Fault
from kda_judge.arms.protocol import HOT, Timed
from kda_judge.evidence.run_record import LIMIT_ARM, Metric, Verdict
from kda_judge.judge.clock_check import LONG_US, LOOPS, longer, suspect
from kda_judge.judge.row_notes import ArmNotes
from kda_judge.judge.sampler import Sampler
from kda_judge.session import Request, frozen_rows, open_session

CLAIMED = [20_000.0, 20_100.0, 19_900.0]
LONG, LONG_OF_LESS = 6, 7
"""Times the calls of a sample, for 120 ms of 20 ms that are claimed, and of 2% less."""


@pytest.mark.parametrize(
    ("missing", "expected"),
    [(0.0, False), (0.01, False), (0.02, True), (0.04, True)],
)
def test_two_percent_that_were_not_claimed_are_suspect(missing, expected):
    protocol = 600.0
    long = [claim * missing / (1 - missing) + protocol for claim in CLAIMED]
    assert suspect(long, protocol, CLAIMED) is expected


def test_one_late_reply_is_not():
    assert not suspect([600.0, 9_000.0, 610.0], 590.0, CLAIMED)


def test_samples_of_a_moment_are_not():
    assert not suspect([600.0], 0.0, [900.0])
    assert suspect([0.0], 0.0, [900.0], lasting=True), "such an arm made its loop short itself"


@pytest.mark.parametrize(("claimed", "times"), [(2_500.0, 48), (10_000.0, 12), (90_000.0, 6)])
def test_longer_loops_outlast_what_the_host_does_in_between(claimed, times):
    assert longer([claimed] * 3) == times
    assert times * claimed >= LONG_US


class Loops:
    """A process whose worker claims a share of each loop's time; `late_us` are the judge's delays in turn."""

    def __init__(self, claimed, late_us):
        self.claimed, self.late_us, self.asked = claimed, list(late_us), []

    def ask(self, command, reply, count=None, times=None, **rest):
        self.asked.append((command, count or times, *rest.values()))
        passed = 20.0 * (count or 10 * times)
        late = self.late_us[(len(self.asked) - 1) % len(self.late_us)]
        claim = self.claimed * passed
        times_us = {"total_us": claim} if count else {"total_us": passed, "events_us": claim}
        return Timed(calls=count or 10 * times, **times_us), (passed + 500.0 + late) / 1e6

    def give_up(self, verdict, text):
        return Fault(verdict, text)


def hold(claimed, late_us=(0.0,), limit=None, short_us=(500.0, 8_000.0, 510.0), metric=Metric.WALL, calls=1000):
    """What the judge says to an arm of 1000 calls of 20 us a sample, and the loops that it asked for."""
    sampler = Sampler(SimpleNamespace(settings=SimpleNamespace(samples=3, target_sample_us=20_000)), None)
    case = SimpleNamespace(
        most_calls=lambda calls: calls, restore=lambda: None, row=SimpleNamespace(inplace=(), restore=())
    )
    excess = 500.0 + 20 * calls * (1 - claimed) + late_us[0]
    arm = ArmNotes(
        calls=calls,
        replays=100,
        protocol_us={metric: [excess] * 3, Metric.LATENCY: list(short_us)},
        claimed_us={metric: [20 * calls * claimed] * 3},
    )
    process = Loops(claimed, late_us)
    others = {} if limit is None else {LIMIT_ARM: limit}
    try:
        sampler._hold_to_clock(case, SimpleNamespace(arms={"arm": arm, **others}), arm, process)
    except Fault as fault:
        return fault, process.asked
    return None, process.asked


@pytest.mark.parametrize("limit", [None, ArmNotes(), ArmNotes(protocol_us={Metric.LATENCY: [480.0] * 3})])
def test_who_claims_two_percent_less_is_invalid(limit):
    fault, asked = hold(0.98, limit=limit)
    assert fault.verdict is Verdict.INVALID
    assert str(fault).startswith("wall: claims 2.0% less time than passed by the judge's clock")
    assert asked == [("wall", (LONG_OF_LESS << number) * 1000, None) for number in range(LOOPS)]


def test_an_arm_without_short_loops_is_held_to_its_long_ones():
    """As the portable arms are once the limits' worker has crashed."""
    assert hold(1.0, short_us=(), limit=ArmNotes()) == (None, [("wall", LONG * 1000, None)])
    fault, asked = hold(0.95, short_us=(), limit=ArmNotes())
    assert fault.verdict is Verdict.INVALID
    assert len(asked) == LOOPS


def test_events_that_see_two_percent_less_than_the_replays_are_invalid():
    fault, asked = hold(0.98, metric=Metric.DEVICE)
    assert fault.verdict is Verdict.INVALID
    assert str(fault).startswith("device: claims 2.0% less time than passed by the judge's clock")
    assert asked == [("replay", (LONG_OF_LESS << number) * 100, HOT) for number in range(LOOPS)]
    twice = [("replay", LONG * 100, HOT), ("replay", LONG * 200, HOT)]
    assert hold(1.0, [4_000.0, 0.0], metric=Metric.DEVICE) == (None, twice)


def test_an_honest_arm_is_asked_nothing():
    assert hold(1.0) == (None, [])


def test_an_honest_arm_whose_replies_come_late_is_asked_until_one_does_not():
    thrice = [("wall", LONG * 1000 * times, None) for times in (1, 2, 4)]
    assert hold(1.0, [4_000.0, 5_000.0, 0.0]) == (None, thrice)


def test_loops_of_an_arm_that_shaves_much_stay_as_long_as_they_are():
    """The loop that it claims to be 120 ms long lasts far longer, and has to end before the worker's time is up."""
    fault, asked = hold(0.5)
    assert fault.verdict is Verdict.INVALID
    assert len(set(asked)) == 1
    assert len(asked) == LOOPS


def test_a_host_that_is_late_by_the_same_each_time_is_no_shaved_time():
    """As on a busy machine: of loops that grow, five milliseconds are less and less."""
    assert hold(1.0, [5_000.0] * LOOPS)[0] is None


def test_short_replies_that_are_slow_hide_nothing_from_the_limits_worker():
    """An arm may claim nothing of its short loops, so that the protocol looks dear."""
    dear = (2_000.0,) * 3
    assert hold(0.97, short_us=dear) == (None, [])
    assert hold(0.97, limit=ArmNotes(protocol_us={Metric.LATENCY: [500.0] * 3}), short_us=dear)[0] is not None


def test_samples_too_short_for_the_clock_are_judged_by_longer_loops():
    """An arm may be slow while the calls of a sample are counted, so that there is one."""
    fault, asked = hold(0.7, calls=1)
    assert fault.verdict is Verdict.INVALID
    assert len(asked) == LOOPS
    assert hold(1.0, calls=1)[0] is None


def test_only_arms_that_would_gain_are_held_to_the_clock(toy, monkeypatch):
    held = []
    monkeypatch.setattr(Sampler, "_hold_to_clock", lambda *given: held.append(given[-1].spec.name))
    session = open_session(Request(task=toy, rows=["out-*"], against=["eager"], device="cpu", generations=1))
    assert bench.run(session, frozen_rows(session)).rows
    assert set(held) == {"solution"}
