"""What an iteration asks the judge for, and what it keeps of the answer. The times themselves need a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.judge.tests.records_factory import gpu_reading, make_checkout, make_record
from core.tools.tests.campaign_toy import HYPOTHESIS, campaign, speed
from kda_judge.bench import run
from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence.gpu_state import GpuProcess, GpuState
from kda_judge.evidence.run_record import Metric, Verdict
from kda_judge.session import Request, open_session
from kda_tools.campaign import decision, iterate, measure
from kda_tools.campaign.events import RowOutcome
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.rules import Rules

__all__ = ["campaign"]


def test_the_best_so_far_runs_as_an_arm(campaign: Campaign) -> None:
    """Taken from its commit, by the real judge, while the worktree holds something else."""
    speed(campaign, 1.2)
    iterate.iterate(campaign, HYPOTHESIS)
    (campaign.task.path / "solution" / "__init__.py").write_text("raise SystemExit('not the best')\n")
    with measure.best_arm(campaign.repository, campaign.folder, campaign.state().best) as ports:
        assert "# speed: 1.2" in (ports["best"] / "__init__.py").read_text()
        request = Request(campaign.task, subject="eager", against=["best"], ports=ports, device="cpu", rows=["out-*"])
        record = run(open_session(request))
    (row,) = record.rows
    assert row.arms["best"].correctness.passed, row.reason
    assert row.verdict is Verdict.CORRECT


def test_the_session_on_a_gpu_is_short_and_has_both_opponents(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(measure.gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ports = {"best": campaign.task.path / "solution"}
    settings = measure._session(campaign.task, Rules(), ["out-64x16"], ports).settings
    assert (settings.subject, settings.against, settings.beside) == ("solution", ("baseline", "best"), ())
    assert (settings.generations, settings.samples, settings.target_sample_us) == (5, 4, 2500)
    assert settings.rows == ("out-64x16",)


def test_samples_of_what_decides_are_kept(tmp_path: Path) -> None:
    record = make_record(make_checkout(tmp_path))
    rows = tuple(
        row.model_copy(update={"arms": {**row.arms, "best": row.arms["upstream_latest"]}}) for row in record.rows
    )
    found = measure.measured(record.model_copy(update={"rows": rows}))
    assert (found.gpu, found.failure, found.run_id) == ("NVIDIA H200", None, record.run_id)
    small = found.rows[0]
    assert small.metric == "device"
    assert set(small.samples) == {"baseline", "best", "solution"}, "no arm is kept that decides nothing"
    assert small.samples["best"] == record.rows[0].arms["upstream_latest"].samples[Metric.DEVICE]
    assert small.limit_us is not None
    assert decision.test(found.pairs, list(found.pairs), 40).gain.estimate == pytest.approx(0.9 / 0.5, rel=0.01)
    mean = found.against_baseline()
    assert mean is not None
    assert mean.estimate == pytest.approx(2.0, rel=0.01)


def test_without_a_graph_of_either_the_wall_decides(tmp_path: Path) -> None:
    record = make_record(make_checkout(tmp_path))
    row = record.rows[0]
    arms = {**row.arms, "best": row.arms["upstream_latest"]}

    def captured_no_more(name: str) -> RowOutcome:
        arm = arms[name]
        walls = {metric: taken for metric, taken in arm.samples.items() if metric is not Metric.DEVICE}
        arms[name] = arm.model_copy(update={"samples": walls, "no_graph": "it synchronises"})
        return measure.measured(record.model_copy(update={"rows": (row.model_copy(update={"arms": arms}),)})).rows[0]

    found = captured_no_more("solution")
    assert (found.metric, found.reason) == (None, "no CUDA graph: it synchronises; the best has one")
    assert found.verdict is Verdict.ERROR
    found = captured_no_more("best")
    assert (found.metric, found.limit_us) == ("wall", None)


@pytest.mark.parametrize("arm", ["best", "baseline", "solution"])
def test_a_row_that_another_arm_spoils_is_measured_again(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    """On a busy machine the judge's clock may contradict any arm's. Only the candidate's own times are its failure."""
    good = make_record(make_checkout(tmp_path))
    first, *rest = (row.model_copy(update={"id": f"out-{number}"}) for number, row in enumerate(good.rows))
    spoilt = first.model_copy(update={"verdict": Verdict.INVALID, "reason": f"{arm}: device: the judge's clock saw"})
    asked: list[list[str]] = []

    def ran(_: object, rows: tuple[SimpleNamespace, ...], **__: object) -> object:
        asked.append([row.id for row in rows])
        found = (spoilt, *rest) if len(asked) == 1 else (first,)
        return good.model_copy(update={"rows": tuple(found), "noisy": ("warm",) if len(asked) == 2 else ()})

    ids = [first.id, *(row.id for row in rest)]
    monkeypatch.setattr(measure, "run", ran)
    monkeypatch.setattr(measure, "_session", lambda *_: None)
    monkeypatch.setattr(measure, "frozen_rows", lambda _: tuple(SimpleNamespace(id=one) for one in ids))
    monkeypatch.setattr(measure.gpu_state, "has_gpu", lambda: True)
    state = campaign.state()
    found = measure.measure(campaign.task, Rules(), campaign.repository, state.best, state.launched.target)
    again = arm != "solution"
    assert asked == ([ids, [first.id]] if again else [ids])
    assert [row.id for row in found.rows] == ids
    assert (found.failure is None) == again
    assert found.noisy == (("warm",) if again else ())


def test_rows_of_production_are_measured_unless_the_rules_name_others(campaign: Campaign) -> None:
    assert measure.chosen_rows(campaign.task, Rules()) == ["out-64x16", "inplace-64x16"]
    assert measure.chosen_rows(campaign.task, Rules(rows=("out-*",))) == ["out-64x16"]


def test_a_busy_gpu_begins_nothing(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterate, "demand_idle_gpu", measure.demand_idle_gpu)
    monkeypatch.setattr(measure.gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(measure.gpu_state, "read_state", lambda *_: None)
    monkeypatch.setattr(measure.gpu_state, "busy", lambda _: "pid 7 holds 3 GB")
    speed(campaign, 1.2)
    with pytest.raises(
        MissingRequirement, match=r"pid 7 holds 3 GB. Wait, then repeat the command: nothing was recorded"
    ):
        iterate.iterate(campaign, HYPOTHESIS)
    assert campaign.state().tries == 0


def test_an_iteration_after_another_in_one_process_does_not_find_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: int, own: list[int]) -> GpuState:
        held = () if own == [os.getpid()] else (GpuProcess(pid=os.getpid(), memory_mb=500),)
        return gpu_reading().model_copy(update={"processes": held})

    monkeypatch.setattr(measure.gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(measure.gpu_state, "read_state", read)
    monkeypatch.setattr(measure.gpu_state, "holding", lambda: [os.getpid()])
    assert measure.demand_idle_gpu()
