"""The core that arms are timed on: which one is chosen, and that all arms follow."""

import os
from contextlib import contextmanager

import pytest

from core.judge.tests.test_judge import bench
from kda_judge import bench as bench_module
from kda_judge.arms.arm_process import ArmProcess
from kda_judge.evidence.run_record import Verdict
from kda_judge.judge import quiet_core
from kda_judge.judge.quiet_core import QuietCore


class Machine:
    """Cores, each with the milliseconds that the work takes there now."""

    def __init__(self, monkeypatch, **times):
        self.times = {int(name.removeprefix("core")): took for name, took in times.items()}
        self.allowed = set(self.times)
        self.tried = []
        monkeypatch.setattr(quiet_core.os, "sched_setaffinity", self.pin)
        self.chosen = QuietCore(list(self.times), self.work)

    def pin(self, process, cores):
        assert process == 0
        self.allowed = set(cores)

    def work(self):
        (core,) = self.allowed
        self.tried.append(core)
        return self.times[core]


def test_the_fastest_core_is_chosen_and_the_judge_leaves_it(monkeypatch):
    machine = Machine(monkeypatch, core0=1.7, core1=1.0, core2=1.02)
    assert machine.chosen.choose() == 1
    assert machine.allowed == {0, 2}
    machine.chosen.release()
    assert machine.allowed == {0, 1, 2}


def test_a_core_is_kept_while_nobody_slows_it_down(monkeypatch):
    machine = Machine(monkeypatch, core0=1.7, core1=1.0, core2=1.01)
    machine.chosen.choose()
    machine.times |= {1: 1.1, 2: 0.9}
    machine.tried.clear()
    assert machine.chosen.choose() == 1
    assert machine.tried == [1], "one look, not a search"


def test_a_slow_core_is_left_for_the_first_quiet_one(monkeypatch):
    machine = Machine(monkeypatch, core0=1.0, core1=1.02, core2=1.03)
    assert machine.chosen.choose() == 0
    machine.times[0] = 1.8
    assert machine.chosen.choose() == 2
    assert machine.allowed == {0, 1}
    machine.times[0] = 1.0
    assert machine.chosen.choose() == 2, "it goes back for no reason"
    assert machine.chosen.usual == 2


def test_where_all_cores_are_slow_the_fastest_is_taken(monkeypatch):
    machine = Machine(monkeypatch, core0=1.0, core1=1.0, core2=1.0)
    assert machine.chosen.choose() == 2
    machine.times = {0: 1.6, 1: 1.9, 2: 1.8}
    assert machine.chosen.choose() == 0
    machine.times = {0: 1.6, 1: 1.9, 2: 1.8}
    assert machine.chosen.choose() == 0, "it leaves the fastest"


@pytest.mark.parametrize("cores", [[], [3]])
def test_without_a_second_core_nothing_is_pinned(monkeypatch, cores):
    monkeypatch.setattr(quiet_core.os, "sched_setaffinity", lambda *_: pytest.fail("pinned"))
    chosen = QuietCore(cores)
    assert chosen.choose() is None
    assert chosen.usual is None
    chosen.release()


def test_the_work_takes_time_and_little_of_it():
    assert 1e-5 < quiet_core.work_s() < 0.1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_arms_follow_when_the_core_changes(toy, monkeypatch):
    """On the CPU, where nothing is pinned by itself; an arm elsewhere would be INVALID."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    asked, ask = [], ArmProcess.ask

    class Changing(QuietCore):
        def choose(self):
            self.core = second if self.core == first else first
            return self.core

    @contextmanager
    def changing(_session):
        yield Changing([])

    def pins(self, command, *given, **named):
        if command == "pin":
            asked.append((self.spec.name, named["core"]))
        return ask(self, command, *given, **named)

    monkeypatch.setattr(bench_module, "_cores", changing)
    monkeypatch.setattr(ArmProcess, "ask", pins)
    record = bench(toy, "solution", "out", generations=1)
    assert [row.verdict for row in record.rows] == [Verdict.CORRECT]
    for name in ("eager", "solution"):
        assert [core for arm, core in asked if arm == name] == [first, second, None]
