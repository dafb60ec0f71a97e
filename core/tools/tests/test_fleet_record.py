"""What a recorded run over many GPUs took: from the events of its folder to the table of the page."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from core.judge.tests.records_factory import make_record
from core.tools.tests.test_compare_runs import new_run
from core.tools.tests.test_fleet import facts, order, result
from kda_judge.evidence import ledger, record_log
from kda_judge.evidence.run_record import Interval, Neighbours, Repeat, SharedHost
from kda_tools.fleet import fleet_page, fleet_record
from kda_tools.fleet.fleet_page import PAGE
from kda_tools.fleet.fleet_record import LOG, FleetRecord
from kda_tools.fleet.pieces import Job, Piece
from kda_tools.fleet.run_folder import Plan, RunFolder

FILES = {"fake": "ab" * 32}


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate=estimate, low=low, high=high, level=0.95)


def shared() -> SharedHost:
    walls = ((1.0, 2.0),)
    alone = Repeat(first=walls, second=walls, ratio=interval(1.0, 0.99, 1.01))
    return SharedHost(
        neighbours=1,
        rows={
            "fake r": Neighbours(alone=alone, beside=Repeat(first=walls, second=walls, ratio=interval(0.8, 0.7, 0.9)))
        },
    )


def ended(path: Path, resumed: bool = False, planned: str = "abc") -> FleetRecord | None:
    """The record of a run of the pieces a, b and c on two of three workers, of which one attempt was lost."""
    pieces = tuple(Piece(id=name, subject="fake") for name in planned)
    plan = Plan(order=order(Job.VALIDATE, record=True), pieces=pieces, commit="1" * 40, files=FILES)
    with RunFolder(path).open() as folder:
        folder.note("planned", plan=plan)
        for worker in ("n/0", "n/1", "n/2"):
            folder.note("joined", worker=worker, node="n", gpu=f"GPU-{worker}")
        folder.note("measured", node="n", shared=shared())
        if resumed:
            folder.note("resumed")
        for name, worker in zip("abc", ("n/0", "n/1", "n/0"), strict=True):
            folder.note("started", piece=name, worker=worker, node="n", attempt=1)
            if name == "b":
                folder.note("lost", piece=name, worker=worker, seconds=3.0, why="gone")
            folder.keep(result(name), worker=worker)
        return fleet_record.recorded(folder, plan, facts())


def made(workers: int, work_s: float, **more: Any) -> FleetRecord:
    usual: Mapping[str, Any] = {
        "utc": f"2026-11-25T00:00:0{workers}.000Z",
        "command": "kda fleet run validate fake --record",
        "job": Job.VALIDATE,
        "names": ("fake",),
        "commit": "1" * 40,
        "dirty": False,
        "files": FILES,
        "gpu": "NVIDIA H100",
        "versions": {"driver": "580.1"},
        "workers": workers,
        "nodes": 1,
        "pieces": 3 * workers,
        "lost": 0,
        "ready_s": 10.0,
        "work_s": work_s,
        "busy_s": work_s * workers,
    }
    return FleetRecord(**{**usual, **more})


def test_the_record_counts_workers_lost_attempts_and_seconds_of_work(tmp_path):
    one = ended(tmp_path / "run")
    assert one is not None
    assert (one.workers, one.nodes, one.pieces, one.lost) == (2, 1, 3, 1)
    assert one.busy_s == 3 * 2.0 + 3.0
    assert one.work_s >= 0
    assert one.shared == {"n": shared()}
    assert (one.job, one.names, one.files, one.commit) == (Job.VALIDATE, ("fake",), FILES, "1" * 40)


def test_of_a_resumed_run_there_is_no_record(tmp_path):
    assert ended(tmp_path / "run", resumed=True) is None


def test_what_a_time_limit_left_is_counted_and_such_a_run_is_compared_with_no_other(tmp_path):
    one = ended(tmp_path / "run", planned="abcde")
    assert one is not None
    assert (one.pieces, one.left) == (5, 2)
    lines = fleet_page.table([made(1, 100.0), made(2, 60.0, left=2)]).splitlines()
    (two,) = [line for line in lines if "2 NVIDIA H100" in line]
    assert "4 of 6 pieces" in two
    assert "| 120, 100% | - |" in two


def test_the_work_ends_with_the_last_piece_that_was_interrupted(tmp_path, monkeypatch):
    """Lines from before that end with the last whole piece: their GPUs seem to work for longer than the run."""
    keep = RunFolder.keep

    def interrupted_at_last(folder, one, worker=None, part=False):
        kept = keep(folder, one, worker, part)
        if one.piece == "c":
            time.sleep(0.3)
            folder.note("interrupted", piece="d", worker="n/1", seconds=9.0)
        return kept

    monkeypatch.setattr(RunFolder, "keep", interrupted_at_last)
    one = ended(tmp_path / "run", planned="abcd")
    assert one is not None
    assert one.work_s >= 0.3
    assert "| 100 |" in fleet_page.table([made(2, 100.0)])
    assert fleet_page.table([made(2, 100.0, busy_s=216.0)]) == fleet_page.NOTHING


def test_a_record_is_appended_once(tmp_path):
    for one in (made(1, 100.0), made(1, 100.0), made(2, 60.0)):
        fleet_record.append(tmp_path, one)
    assert record_log.read(tmp_path / LOG, FleetRecord) == [made(1, 100.0), made(2, 60.0)]


@pytest.mark.parametrize(
    ("alone", "cell"),
    [
        ({}, "1.67 of 2"),
        ({"files": {"fake": "cd" * 32}}, "-"),  # other files: other work
        ({"rows": ("r*",)}, "-"),
        ({"gpu": "NVIDIA H200"}, "-"),
        ({"missing": 16}, "-"),
    ],
)
def test_several_gpus_stand_beside_one_on_the_same_work(alone, cell):
    lines = fleet_page.table([made(1, 100.0, **alone), made(2, 60.0, shared={"n": shared()})]).splitlines()
    (two,) = [line for line in lines if "2 NVIDIA H100" in line]
    assert f"| {cell} |" in two
    assert "fake r: 1.250, A/A 0.990 to 1.010" in two


@pytest.mark.parametrize(("faster", "cell"), [(1.0, "2 of 2"), (1.2, "1 of 2")])
def test_rows_of_a_bench_are_compared_with_those_on_one_gpu(task, tmp_path, faster, cell):
    """Of runs with the fleet's command only those that began while it worked are the fleet's."""
    alone = made(1, 100.0, job=Job.BENCH, command="one", utc="2026-11-20T04:29:50.000Z")
    several = made(2, 60.0, job=Job.BENCH, command="two", utc="2026-11-21T04:29:50.000Z")
    later = {"command": "two", "utc": "2026-11-22T04:30:00Z", "run_id": "20261122T043000Z-000009"}
    for record, changes in (
        (make_record(task), {"command": "one"}),
        (new_run(task, faster), {"command": "two"}),
        (new_run(task, 2.0), later),
    ):
        ledger.append(task.ledger, record.model_copy(update=changes))
    (two,) = [line for line in fleet_page.table([alone, several]).splitlines() if "2 NVIDIA H100" in line]
    assert f"| 1.67 of 2 | {cell} |" in two


def test_the_latest_run_of_a_work_is_shown_and_the_page_is_made_from_the_log(tmp_path):
    page = tmp_path / PAGE
    page.parent.mkdir()
    page.write_text("a\n<!-- kda:runs:begin -->\n<!-- kda:runs:end -->\n")
    assert fleet_page.publish(tmp_path, check=False)
    assert "Nothing is recorded yet" in page.read_text()
    for one in (made(2, 60.0), made(2, 55.0, utc="2026-11-25T00:00:09.000Z")):
        fleet_record.append(tmp_path, one)
    assert fleet_page.publish(tmp_path, check=True)
    assert fleet_page.publish(tmp_path, check=False)
    assert "| 55 |" in page.read_text()
    assert "| 60 |" not in page.read_text()
    assert not fleet_page.publish(tmp_path, check=True)
