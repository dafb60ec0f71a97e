"""What a record cannot say, although every number in it follows from its samples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.run_record import ArmRow, Metric, RunRecord, Verdict


def changed(record: RunRecord, change: Callable[[ArmRow], dict[str, object]], name: str = "solution") -> RunRecord:
    """The record with one arm of its first row changed, and everything computed again."""
    row = record.rows[0]
    arm = row.arms[name].model_copy(update=change(row.arms[name]))
    rows = (row.model_copy(update={"arms": {**row.arms, name: arm}}), *record.rows[1:])
    return recompute(record.model_copy(update={"rows": rows}))


def scaled(metric: Metric, by: float) -> Callable[[ArmRow], dict[str, object]]:
    def change(arm: ArmRow) -> dict[str, object]:
        return {"samples": {**arm.samples, metric: tuple(tuple(x * by for x in part) for part in arm.samples[metric])}}

    return change


def repeated(arm: ArmRow) -> dict[str, object]:
    walls = arm.samples[Metric.WALL]
    return {"samples": {**arm.samples, Metric.WALL: (walls[0],) * len(walls)}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled(Metric.WALL, 0.01), "us is less than the GPU alone takes"),
        (scaled(Metric.LATENCY, 0.01), "us is less than the GPU alone takes"),
        (scaled(Metric.COLD, 0.1), "us is less than the GPU takes with its caches full"),
        (repeated, "samples.wall: expected generations that differ, got one of them twice"),
        (lambda _: {"clock_ratio": {Metric.WALL: 50.0}}, "clock_ratio.wall: expected 1 to 2, got 50.0"),
    ],
)
def test_times_that_cannot_be_true_are_named(tmp_path: Path, change, words: str) -> None:
    record = make_record(make_checkout(tmp_path))
    assert mismatches(record) == []
    found = mismatches(changed(record, change))
    assert any(line.startswith(f"row {record.rows[0].id}: arms.solution.") and words in line for line in found), found


def test_who_cannot_be_captured_where_the_opponent_can_is_not_faster(tmp_path: Path) -> None:
    """It would choose the wall to decide, which its launcher wins."""

    def without(arm: ArmRow) -> dict[str, object]:
        kept = {metric: parts for metric, parts in arm.samples.items() if metric not in (Metric.DEVICE, Metric.COLD)}
        return {"samples": kept, "no_graph": "it synchronises"}

    record = make_record(make_checkout(tmp_path))
    assert record.rows[0].verdict is Verdict.FASTER
    alone = changed(record, without).rows[0]
    assert (alone.verdict, alone.reason) == (
        Verdict.NOT_FASTER,
        "no CUDA graph of solution: it synchronises; baseline has one",
    )
    both = changed(changed(record, without), without, "baseline").rows[0]
    assert both.verdict is Verdict.FASTER
    assert both.reason.endswith("(of wall: no CUDA graph of solution: it synchronises)")
