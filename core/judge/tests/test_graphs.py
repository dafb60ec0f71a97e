"""CUDA graphs as the judge asks for them, on a CPU: what is compared, and what an arm may not remember in a capture."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from kda_judge import bench
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Metric, Verdict
from kda_judge.judge.sampler import SMALL_GRAPH_CALLS, Sampler
from kda_judge.session import Request, frozen_rows, open_session

HEAD = "from core.judge.tests import cpu_graphs\ncpu_graphs.install()\n"
EAGER = """
def axpy(x, y, *, factor):
    return factor * x + y
def axpy_(x, y, *, factor):
    x.mul_(factor).add_(y)
"""
REMEMBERS = """
LAST = {}
def axpy(x, y, *, factor):
    if not cpu_graphs.CAPTURING[0]:
        LAST.clear()
        return factor * x + y
    if x.data_ptr() not in LAST:
        LAST[x.data_ptr()] = factor * x + y
    return LAST[x.data_ptr()]
"""
ONLY_THE_CANARY = """
USUAL = []
def axpy_(x, y, *, factor):
    USUAL.append(x.data_ptr())
    if not cpu_graphs.CAPTURING[0] or x.data_ptr() != USUAL[0]:
        x.mul_(factor).add_(y)
"""
ONLY_THE_FIRST = """
def axpy(x, y, *, factor):
    global SEEN, LAST
    if not cpu_graphs.CAPTURING[0]:
        SEEN = 0
        return factor * x + y
    SEEN += 1
    if SEEN == 1 or SEEN == 20:
        LAST = factor * x + y
    return LAST
"""
REFUSES_A_CHANGE = """
import sys
def axpy(x, y, *, factor):
    if cpu_graphs.CAPTURING[0] and sys._getframe(1).f_locals["change"] is not None:
        raise RuntimeError("not this one")
    return factor * x + y
"""


@pytest.fixture
def measured(toy, monkeypatch):
    """Run a row with an arm of this source, as on a GPU: device and cold times of every arm, all on CPU graphs."""

    def run(source, row, cold=True):
        for name, text in (("arm", source), ("other", EAGER)):
            (toy.path / "faulty" / f"{name}.py").write_text(HEAD + text)
        config = toy.path / "config.toml"
        arms = "".join(f'\n[arms.{name}]\nmodule = "faulty.{name}"\ndevices = ["cpu"]\n' for name in ("arm", "other"))
        config.write_text(config.read_text() + arms)
        request = Request(
            task=Task(toy.path), rows=[f"{row}-*"], subject="arm", against=["other"], device="cpu", generations=1
        )
        session = open_session(request)
        settings = session.settings.model_copy(update={"cold": cold, "samples": 2})
        monkeypatch.setattr(bench, "_l2_bytes", lambda device: 1 << 14)
        timed = [Metric.WALL, Metric.LATENCY, Metric.DEVICE, *([Metric.COLD] if cold else [])]
        monkeypatch.setattr(Sampler, "_metrics", lambda self, name: timed)
        record = bench.run(dataclasses.replace(session, settings=settings), frozen_rows(session))
        return record.rows[0]

    return run


@pytest.mark.parametrize(("row", "changed"), [("out", 2), ("inplace", 1)])
def test_an_honest_arm_is_right_in_every_graph(measured, row, changed):
    found = measured(EAGER, row)
    assert found.verdict is Verdict.CORRECT, found.reason
    draws, slices, samples, audit = 9, 1, 2 * 3, 3  # a sample compares wall, device and cold
    assert found.arms["arm"].correctness.checks == draws + slices + samples + audit + changed


@pytest.mark.parametrize("row", ["out", "inplace"])
def test_graphs_are_timed_without_cold_inputs_too(measured, row):
    found = measured(EAGER, row, cold=False)
    assert found.verdict is Verdict.CORRECT, found.reason
    draws, slices, samples, audit = 9, 1, 2 * 2, 3  # a sample compares wall and device
    assert found.arms["arm"].correctness.checks == draws + slices + samples + audit


@pytest.mark.parametrize(
    ("source", "row"),
    [
        (REMEMBERS, "out"),
        (ONLY_THE_CANARY, "inplace"),
        (ONLY_THE_FIRST, "out"),
    ],
)
def test_what_a_capture_remembers_is_found(measured, source, row):
    found = measured(source, row)
    assert found.verdict is Verdict.INCORRECT, found.reason
    assert re.search(r"elements outside tolerance.*\[inputs: a 64th of them drawn again\]", found.reason)


def test_a_capture_without_the_check_is_no_capture(measured):
    """An arm that can be captured, but not where inputs change, would go on unchecked."""
    found = measured(REFUSES_A_CHANGE, "out")
    assert found.verdict is Verdict.ERROR, found.reason
    assert "has no CUDA graph whose inputs change: RuntimeError: not this one" in found.reason


@pytest.mark.parametrize(
    ("restore", "moved", "cold", "calls"),
    [
        (False, 200, False, SMALL_GRAPH_CALLS),
        (False, 201, False, 20),  # the L2 does not hold it
        (True, 200, False, 30),  # every call has a set of its own
        (False, 200, True, 64),
    ],
)
def test_graphs_of_rows_that_the_l2_serves_are_large(restore, moved, cold, calls):
    spec = SimpleNamespace(traffic=SimpleNamespace(moved=moved), sets=[{}] * 64, hot=30 if restore else 1)
    sampler = Sampler(SimpleNamespace(l2_bytes=100), None)
    case = SimpleNamespace(row=SimpleNamespace(restore=restore), spec=spec)
    assert sampler._graph_calls(case, cold) == calls
