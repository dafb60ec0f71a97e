"""How a fleet splits work, keeps what comes, refuses odd workers, and judges what neighbours do. No Ray, no GPU."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.judge.tests.records_factory import gpu_reading, make_record, samples
from core.tools.tests import test_grid_records as grids
from core.tools.tests import test_tune as sweeps
from kda_judge import bench
from kda_judge.contract.errors import ArmFailed, LedgerError, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.contract.workloads import TensorSpec
from kda_judge.evidence import ledger
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.neighbours import disturbed
from kda_judge.evidence.run_record import Metric, Repeat
from kda_judge.judge.open_row import footprint
from kda_judge.session import Request, open_session
from kda_tools.fleet import interference, piece_jobs, piece_process, plan_pieces, ray_pool, run_fleet
from kda_tools.fleet.checkout import in_place, pack_checkout
from kda_tools.fleet.deliver import adversary_endings, deliver
from kda_tools.fleet.drive import Driver, Worker, WorkerReport
from kda_tools.fleet.gpu_worker import GpuWorker
from kda_tools.fleet.join_sweeps import join_sweeps
from kda_tools.fleet.live_view import busy_s, event_line, summary
from kda_tools.fleet.node_facts import changed_facts, differing_workers, refuse_odd
from kda_tools.fleet.past_runs import seconds_of_rows
from kda_tools.fleet.pieces import Answer, Job, NodeFacts, Order, Piece, Question, Result, cut, deal, remaining
from kda_tools.fleet.places import kind_of, places
from kda_tools.fleet.plan_pieces import names, plan
from kda_tools.fleet.run_folder import Plan, RunFolder
from kda_tools.fleet.schedule import Schedule
from kda_tools.lab.adversaries import page
from kda_tools.lab.adversaries.table import ADVERSARIES
from kda_tools.lab.grid import grid_record
from kda_tools.lab.grid.grid_rows import whole_grid
from kda_tools.lab.tune import run_sweep, tuning_files
from kda_tools.models import known_models, run_step
from kda_tools.project.export import portable as export
from kda_tools.publish import joined_runs
from kda_tools.publish.report import publishable

PIECES = [Piece(id=name, subject="fake") for name in "abc"]


def order(job: Job = Job.BENCH, *ops: str, **more: Any) -> Order:
    return Order(job=job, names=ops or ("fake",), kind="cuda", command=f"kda fleet run {job.value}", **more)


def facts(**more: Any) -> NodeFacts:
    usual: dict[str, Any] = {
        "host": "h",
        "kind": "cuda",
        "gpu": "NVIDIA H200",
        "uuid": "GPU-0",
        "commit": "0" * 40,
        "dirty": False,
        "versions": {"driver": "580.1", "torch": "2.13.0"},
        "files": {"fake": "ab" * 32},
        "cores": 16,
        "cpu": "Synthetic CPU",
    }
    return NodeFacts(**{**usual, **more})


def workers(count: int, node: str = "n") -> list[Worker]:
    return [Worker(f"{node}/{slot}", node, slot, count, facts(uuid=f"GPU-{slot}")) for slot in range(count)]


def result(piece: str, text: str = "{}", **more: Any) -> Result:
    usual: dict[str, Any] = {"attempt": 1, "node": "n", "gpu": "GPU-0", "seconds": 2.0, "complete": True}
    return Result(piece=piece, line=text, **{**usual, **more})


# ---- splitting --------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 16))
def test_a_cut_leaves_nothing_out_and_puts_the_small_pieces_last(count: int, several: int) -> None:
    items = [f"row {number}" for number in range(count)]
    parts = cut(items, several, least=0)
    assert [item for part in parts for item in part] == items
    assert all(parts)
    assert len(parts) <= 3 * several
    sizes = [len(part) for part in parts]
    assert sizes[: several - 1] == sorted(sizes, reverse=True)[: several - 1]
    assert max(sizes, default=0) <= count / several / 2 + 1


@given(st.integers(0, 400), st.integers(1, 16))
def test_few_items_are_one_piece_a_worker_from_all_over_them(count: int, several: int) -> None:
    items = list(map(str, range(count)))
    parts = cut(items, several, least=1000)
    assert sorted((item for part in parts for item in part), key=int) == items
    assert all(parts)
    assert len(parts) <= several
    sizes = [len(part) for part in parts]
    assert max(sizes, default=0) - min(sizes, default=0) <= 4, "each of a worker's four runs has one item more or less"
    if count >= 100 * several:
        assert all(int(part[0]) < count / 4 and int(part[-1]) > count * 3 / 4 for part in parts), "slow ones to all"


def test_the_pieces_of_a_grid_share_few_compiled_kernels() -> None:
    task = find_task("qknorm_rope")
    rows = {row.id: row for row in whole_grid(open_session(Request(task=task, device="cpu")), full=True)}
    launches = task.load("solution").launches

    def kernels(items: Sequence[str]) -> set[str]:
        found = (rows[item] for item in items)
        calls = ((row.op, {name: _meta(spec) for name, spec in row.inputs.items()}, row.scalars) for row in found)
        return {f"{one.name} {one.variant}" for call in calls for one in launches(*call)}

    pieces = plan(order(Job.VALIDATE, task.op), 4)
    assert sorted(item for piece in pieces for item in piece.items) == sorted(rows)
    assert len(pieces) == 4
    every = len(kernels(list(rows)))
    loaded = sum(len(kernels(piece.items)) for piece in pieces)
    in_order = sum(len(kernels(items)) for items in cut(list(rows), 4, least=1000))
    assert every <= loaded < 0.7 * in_order, (every, loaded, in_order)


def _meta(spec: TensorSpec) -> torch.Tensor:
    """A tensor without memory."""
    dtype = getattr(torch, spec.dtype)
    if spec.strides is None:
        return torch.empty(spec.shape, dtype=dtype, device="meta")
    return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="meta")


@given(st.integers(0, 60), st.integers(1, 16), st.integers(0, 3))
def test_dealt_items_take_all_workers_about_as_long(count: int, several: int, power: int) -> None:
    items = {str(number): float(count - number) ** power for number in range(count)}  # the slowest first
    parts = deal(list(items), several)
    assert sorted((item for part in parts for item in part), key=int) == list(items)
    assert len(parts) == min(several, count)
    sums = [sum(items[item] for item in part) for part in parts]
    assert max(sums, default=0.0) - min(sums, default=0.0) <= max(items.values(), default=0.0), "by no more than one"


def test_a_bench_is_split_by_task_or_by_rows_that_join(task: Task) -> None:
    assert plan(order(), 4) == (Piece(id="fake", subject="fake"),)
    halves = plan(order(parts=2), 4)
    assert [piece.items for piece in halves] == [("small-4x8",), ("large-512x8",)]
    assert plan(order(parts=9), 4)[0].id == "fake 1/2"
    assert plan(order(rows=("large*",)), 1)[0].items == ("large-512x8",)


def test_rows_of_a_bench_may_be_those_of_some_tasks_only() -> None:
    asked = order(Job.BENCH, "qknorm_rope", "gelu_cat", "norm_infer", rows=("qwen-19x24*", "flux-4608x3072*"))
    found = {piece.id: piece.items for piece in plan(asked, 1)}
    assert found == {"qknorm_rope": ("qwen-19x24x128",), "gelu_cat": ("flux-4608x3072+12288",)}
    with pytest.raises(UsageError, match=r"--rows 'qwen-19': fits the whole of no id"):
        plan(order(Job.BENCH, "qknorm_rope", "gelu_cat", rows=("flux*", "qwen-19")), 1)


def test_of_a_bench_only_what_recorded_runs_lack(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "has_gpu", lambda: True)
    monkeypatch.setattr(plan_pieces, "open_session", lambda request: request)
    rows, patterns = [f"r{number}" for number in range(5)], list[object]()

    def lacking(request: Request) -> tuple[list[str], str]:
        patterns.append((request.rows, list(request.ports)))
        return rows, "NVIDIA H200"

    monkeypatch.setattr(joined_runs, "rows_without_result", lacking)
    monkeypatch.setattr(export, "write_arm", lambda _task, folder: folder)
    pieces = plan(order(Job.BENCH, "fake", "fake", missing=2, rows=("large*",)), 4)
    assert [(piece.id, piece.items) for piece in pieces[:3]] == [
        ("fake 1/3", ("r0", "r3")),
        ("fake 2/3", ("r1", "r4")),
        ("fake 3/3", ("r2",)),
    ]
    assert pieces[3:] == pieces[:3], "in the order of the tasks, so that the first are complete where the time ends"
    assert patterns[0] == (["large-512x8"], ["portable"]), "the arms of a recorded run decide what it is a result of"
    rows.clear()
    assert plan(order(missing=2), 4) == ()


def test_a_sweep_is_split_by_rows_whose_candidates_stay_together() -> None:
    pieces = plan(order(Job.TUNE, "group_norm_silu"), 2)
    asked = run_sweep.plan(run_sweep.Request(find_task("group_norm_silu"), device="cpu"))
    swept = Counter(item for piece in pieces for item in piece.items)
    assert set(swept) == {trial.row.id for trial in asked.trials}
    assert set(swept.values()) == {1}
    assert len(pieces) >= 2
    one = plan(order(Job.TUNE, "group_norm_silu", rows=(pieces[0].items[0],)), 2)
    assert [piece.items for piece in one] == [(pieces[0].items[0],)]


def test_a_step_of_every_model_with_every_release_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = plan(order(Job.MODEL, "flux", "hunyuan-vae"), 4)
    known = known_models.load_models()
    assert [(piece.subject, piece.items) for piece in pieces] == [
        (name, (release,)) for name in ("flux", "hunyuan-vae") for release in known.releases_of(name)
    ]
    assert len({piece.id for piece in pieces}) == len(pieces) > 2
    asked: list[run_step.Plan] = []

    def run(plan: run_step.Plan, *_: object) -> Any:
        asked.append(plan)
        return SimpleNamespace(model_copy=lambda update: SimpleNamespace(model_dump_json=lambda: json.dumps(update)))

    monkeypatch.setattr(run_step, "run", run)
    question = Question(order=order(Job.MODEL, "flux"), piece=pieces[1], node="n")
    answer = piece_jobs.model(question, pieces[1])
    assert (asked[0].model, asked[0].release) == ("flux", known.releases_of("flux")[1])
    assert json.loads(answer.line or "") == {"node": "n", "attempt": 1}


def test_a_name_that_is_none(task: Task) -> None:
    assert names(Job.BENCH, ["fam/k99_fake", "fake"], "cuda") == ("fake",)
    with pytest.raises(UsageError, match="unknown task 'fakt'; nearest: fake"):
        names(Job.BENCH, ["fakt"], "cuda")
    with pytest.raises(UsageError, match="adversaries 'hang': there is none of this name; nearest: hangs"):
        names(Job.ADVERSARIES, ["hang"], "cpu")
    only_cuda = [one.name for one in ADVERSARIES if one.cpu is None]
    assert only_cuda
    assert not {*only_cuda} & {*names(Job.ADVERSARIES, [], "cpu")}


def node(name: str, gpus: int, **more: Any) -> dict[str, Any]:
    return (
        {"NodeID": f"{name}0123456789", "NodeManagerHostname": name, "Alive": True}
        | {"Resources": {"CPU": 4.0} | ({"GPU": float(gpus)} if gpus else {})}
        | more
    )


def test_places_are_taken_from_the_nodes_in_turn() -> None:
    nodes = [node("b", 8), node("a", 2), node("dead", 8, Alive=False), node("head", 0)]
    assert kind_of(nodes) == "cuda"
    assert kind_of([node("head", 0), node("dead", 8, Alive=False)]) == "cpu"
    assert Counter(place.node for place in places(nodes, "cuda", None, None)) == {"a": 2, "b": 8}
    assert Counter(place.node for place in places(nodes, "cuda", 5, None)) == {"a": 2, "b": 3}
    assert Counter(place.node for place in places(nodes, "cuda", None, 1)) == {"a": 1, "b": 1}
    assert [(place.name, place.slots) for place in places([node("a", 2)], "cuda", None, None)] == [
        ("a/0", 2),
        ("a/1", 2),
    ]
    twins = places([node("a", 1), node("a", 1, NodeID="fedcba9876")], "cuda", None, None)
    assert len({place.name for place in twins}) == 2


# ---- the schedule -----------------------------------------------------------------------------


def test_a_lost_piece_goes_elsewhere_first_and_is_given_up_at_the_limit() -> None:
    schedule = Schedule.of(PIECES[:1], (), {}, limit=2)
    assert schedule.next("one") == (PIECES[0], 1)
    assert schedule.lose("one", "died")
    assert schedule.next("one", ["one", "two"]) is None, "another worker has not tried it"
    assert schedule.next("two", ["one", "two"]) == (PIECES[0], 2)
    assert not schedule.lose("two", "died, too")
    assert (schedule.over, schedule.failed) == (True, {"a": ("died, too", 5)})


def test_the_only_worker_tries_again() -> None:
    schedule = Schedule.of(PIECES[:1], (), {}, limit=3)
    schedule.next("one")
    schedule.lose("one", "died")
    assert schedule.next("one", ["one"]) == (PIECES[0], 2)


def test_attempts_go_on_counting_and_what_is_done_stays_done() -> None:
    schedule = Schedule.of(PIECES, {"a"}, {"a": 1, "b": 2}, limit=1)
    assert [schedule.next(name) for name in ("one", "two", "three")] == [(PIECES[1], 3), (PIECES[2], 1), None]


# ---- the folder -------------------------------------------------------------------------------


def test_a_piece_has_one_complete_result_however_often_it_comes(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open() as folder:
        assert folder.keep(result("a", complete=False, items=("x",)))
        assert folder.keep(result("a", attempt=2))
        assert not folder.keep(result("a", attempt=1))
    with RunFolder(tmp_path).open() as again:
        assert [(one.attempt, one.complete) for one in again.results] == [(1, False), (2, True)]
        assert not again.keep(result("a", attempt=3)), "nor after a restart"
        assert again.complete_pieces == {"a"}
        assert [event.event for event in again.events] == ["interrupted", "finished", "doubled", "doubled"]


@pytest.mark.parametrize("torn", range(1, 200, 23))
def test_what_a_killed_writer_left_of_a_line_is_no_result(tmp_path: Path, torn: int) -> None:
    with RunFolder(tmp_path).open() as folder:
        folder.keep(result("a"))
    whole = folder.results_file.read_bytes()
    folder.results_file.write_bytes(whole + whole.replace(b'"a"', b'"b"')[: min(torn, len(whole) - 1)])
    with RunFolder(tmp_path).open() as again:
        assert again.complete_pieces == {"a"}
        again.keep(result("b"))
    with RunFolder(tmp_path).open() as once_more:
        assert once_more.complete_pieces == {"a", "b"}
    assert (tmp_path / "results.torn").is_file()


def test_one_writer(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match="another `kda fleet` is writing here")
    with RunFolder(tmp_path).open(), refused, RunFolder(tmp_path).open():
        pass


@pytest.mark.parametrize(
    ("address", "failures", "tries", "connected"),
    [("ray://h:1", 2, 3, True), ("ray://h:1", 3, 3, False), (None, 1, 1, False)],
)
def test_a_cluster_whose_server_dies_as_it_starts_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, address: str | None, failures: int, tries: int, connected: bool
) -> None:
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        calls.append(options)
        if len(calls) <= failures:
            raise ConnectionAbortedError("no server for this client")

    fake = SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    refused = pytest.raises(MissingRequirement, match="no server for this client") if not connected else None
    with refused or nullcontext(), ray_pool.cluster(address, None, in_place()) as ray:
        assert ray is fake
    assert len(calls) == tries


def test_what_an_interrupted_attempt_has_finished_is_not_done_again() -> None:
    piece = Piece(id="a", subject="fake", items=("x", "y", "z"))
    done = [result("a", complete=False, items=("y",)), result("b", complete=False, items=("z",))]
    assert remaining(piece, done).items == ("x", "z")


# ---- the loop, over workers that answer as they are told ----------------------------------------


class FakePool:
    """`say(worker, question, loaded)` is the answer, or None for a worker that dies."""

    def __init__(self, several: list[Worker], say: Any) -> None:
        self.workers, self.say = several, say
        self.asked: dict[str, Question] = {}
        self.killed: list[str] = []

    def idle(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.name not in self.asked]

    def alive(self) -> list[Worker]:
        return self.workers

    def starting(self) -> list[str]:
        return []

    def give(self, worker: Worker, question: Question) -> None:
        assert worker.name not in self.asked
        self.asked[worker.name] = question

    def wait(self, _seconds: float) -> list[WorkerReport]:
        asked, self.asked = self.asked, {}
        by_name = {worker.name: worker for worker in self.workers}
        found = [(by_name[name], self.say(by_name[name], question, len(asked))) for name, question in asked.items()]
        return [WorkerReport(worker, answer, "" if answer else "died") for worker, answer in found]

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker.name)

    def retire(self, worker: Worker, why: str) -> None:
        assert why.startswith("shared-host")
        self.workers.remove(worker)

    def interrupt(self) -> None:
        pass


ALL = {"three": 3, "two": 2, "one": 1}
"""Names of pieces, and how many rows each has."""


def ask(piece: Piece, attempt: int, worker: Worker) -> Question:
    return Question(order=order(), piece=piece, node=worker.node, attempt=attempt)


def test_a_gpu_that_fails_costs_attempts_and_no_piece(tmp_path: Path) -> None:
    def say(worker: Worker, question: Question, _loaded: int) -> Answer | None:
        if worker.name == "n/0":
            return None if question.attempt == 1 else Answer(failed="no NVIDIA GPU or driver")
        return Answer(line=json.dumps(question.piece.id if question.piece else ""))

    pieces = [Piece(id=str(number), subject="fake") for number in range(6)]
    with RunFolder(tmp_path).open() as folder:
        schedule = Schedule.of(pieces, (), {}, limit=3)
        assert Driver(folder, FakePool(workers(3), say), ask, 60.0).run(schedule)
        assert not schedule.failed
        assert folder.complete_pieces == {piece.id for piece in pieces}
        assert {one.gpu for one in folder.results} == {"GPU-1", "GPU-2"}
        lost = [event for event in folder.events if event.event == "lost"]
        assert {(event.gpu, event.why) for event in lost} >= {("GPU-0", "died")}
        assert all(json.loads(one.line) == one.piece for one in folder.results)


def test_without_any_worker_the_loop_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open() as folder, pytest.raises(ArmFailed, match=r"3 pieces wait.*--resume"):
        Driver(folder, FakePool([], None), ask, 60.0).run(Schedule.of(PIECES, (), {}, limit=3))


@pytest.mark.parametrize(
    ("left", "each", "done"),
    [
        (190.0, {"a": 10.0, "b": 50.0}, {"two", "one"}),
        (190.0, {"three": 10.0, "b": 50.0}, set(ALL)),
        (60.0, {}, set(ALL)),
        (-1.0, {}, set()),
    ],
)
def test_no_piece_is_begun_that_would_end_too_late(
    tmp_path: Path, left: float, each: dict[str, float], done: set[str]
) -> None:
    """If the longest rows took 50 s, three of another task may take 225 s: a piece of two is begun instead."""
    pieces = [Piece(id=name, subject=name, items=("row",) * count) for name, count in ALL.items()]
    pool = FakePool(workers(1), lambda *_: Answer(line="{}"))
    with RunFolder(tmp_path).open() as folder:
        schedule = Schedule.of(pieces, (), {}, limit=3)
        driver = Driver(folder, pool, ask, 60.0, until=time.monotonic() + left, each_s=each)
        assert driver.run(schedule) == (done == set(ALL))
        assert driver.at_limit(schedule) == (done != set(ALL))
        assert folder.complete_pieces == set(done)
        assert {piece.id for piece in schedule.waiting} == set(ALL) - set(done)
        assert not schedule.failed


@pytest.mark.parametrize(("took", "done"), [(46.0, {"one", "ten"}), (60.0, {"one"})])
def test_the_start_of_a_piece_is_no_time_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: float, done: set[str]
) -> None:
    """A row took 46 s, of which 30 s were the start: ten of another task may take 270 s, and 280 s are left."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def say(*_: object) -> Answer:
        now[0] += took
        return Answer(line="{}")

    pieces = [Piece(id="one", subject="a", items=("row",)), Piece(id="ten", subject="b", items=("row",) * 10)]
    with RunFolder(tmp_path).open() as folder:
        schedule = Schedule.of(pieces, (), {}, limit=3)
        Driver(folder, FakePool(workers(1), say), ask, 900.0, until=now[0] + took + 280.0).run(schedule)
        assert folder.complete_pieces == done


def test_the_first_piece_of_a_task_is_no_longer_than_its_recorded_runs_say(tmp_path: Path, task: Task) -> None:
    """Its last runs took up to 25 s a row beyond the start: in 150 s a worker begins four rows of eight."""
    before = make_record(task)
    rows = len(before.rows)
    for utc, seconds in (("1", 900.0), ("2", 30.0 + 20.0 * rows), ("3", 20.0), ("4", 30.0 + 25.0 * rows)):
        late = {"utc": f"2026-11-19T0{utc}:00:00Z", "run_id": f"2026111{utc}T000000Z-00000{utc}", "seconds": seconds}
        ledger.append(task.ledger, recompute(before.model_copy(update=late)))
    expected = seconds_of_rows(order())
    assert expected == {"fake": 25.0}
    assert seconds_of_rows(order(quick=True)) == {}
    pieces = [Piece(id="fake 1/1", subject="fake", items=tuple("abcdefgh"))]
    begun: list[tuple[str, ...]] = []

    def say(_worker: Worker, question: Question, _loaded: int) -> Answer:
        assert question.piece is not None
        begun.append(question.piece.items)
        return Answer(line="{}")

    with RunFolder(tmp_path / "folder").open() as folder:
        schedule = Schedule.of(pieces, (), {}, limit=3)
        options: dict[str, Any] = {"until": time.monotonic() + 150.0, "divisible": True, "expected_s": expected}
        Driver(folder, FakePool(workers(1), say), ask, 900.0, **options).run(schedule)
    assert begun[0] == ("a", "b", "c", "d")


def test_what_a_limit_leaves_no_time_for_is_left_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 s are left, and a row takes 20 s: one worker begins six rows of eight, the other one the two others."""
    now, begun, limits = [1000.0], list[tuple[str, tuple[str, ...]]](), list[float | None]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def say(_worker: Worker, question: Question, loaded: int) -> Answer:
        assert question.piece is not None
        begun.append((question.piece.id, question.piece.items))
        limits.append(question.limit_s)
        now[0] += (30.0 + 20.0 * len(question.piece.items)) / loaded
        return Answer(line=json.dumps(question.piece.items))

    first, second = (Piece(id=name, subject="k", items=tuple(f"{name}{row}" for row in range(8))) for name in "ab")
    with RunFolder(tmp_path).open() as folder:
        schedule, pool = Schedule.of([first, second], (), {}, limit=3), FakePool(workers(2), say)
        options: dict[str, Any] = {"until": now[0] + 150.0, "divisible": True, "each_s": {"k": 20.0}}
        driver = Driver(folder, pool, ask, 900.0, **options)
        assert not driver.run(schedule)
        assert driver.at_limit(schedule)
        assert begun == [("a", first.items[:6]), ("a", first.items[6:])]
        assert [(one.complete, one.items) for one in folder.results] == [(False, first.items[:6]), (True, ())]
        assert [event.event for event in folder.events if event.event != "started"] == ["part", "finished"]
        assert (folder.complete_pieces, schedule.waiting) == ({"a"}, [second])
        options |= {"until": now[0] + 100.0, "each_s": {"k": 20.0}}
        assert not Driver(folder, FakePool(workers(1), say), ask, 900.0, **options).run(schedule)
        assert begun[2:] == [("b", second.items[:3])]
        assert [piece.items for piece in schedule.waiting] == [second.items[3:]]
        rest = Schedule.of([remaining(second, folder.results)], folder.complete_pieces, {}, limit=3)
        assert Driver(folder, FakePool(workers(1), say), ask, 900.0).run(rest)
        assert begun[3:] == [("b", second.items[3:])]
        assert folder.complete_pieces == {"a", "b"}
    assert limits == [120.0, 120.0, 70.0, None], "within a grid or a sweep no row begins later; 30 s are the start"


def test_a_piece_is_not_done_while_a_part_of_it_waits_runs_or_has_failed() -> None:
    schedule = Schedule.of([Piece(id="a", subject="k", items=("x", "y", "z"))], (), {}, limit=1)
    assert schedule.next("n/0")
    assert not schedule.is_part("n/0")
    schedule.split("n/0", 1)
    assert schedule.running["n/0"][0].items == ("x",)
    assert schedule.is_part("n/0"), "the rest waits"
    taken = schedule.next("n/1")
    assert taken is not None
    assert taken[0].items == ("y", "z")
    assert schedule.is_part("n/0"), "the rest runs"
    assert not schedule.lose("n/1", "died")
    assert schedule.is_part("n/0"), "the rest has failed"


def test_events_and_results_say_what_a_piece_spent_its_time_on(tmp_path: Path) -> None:
    pool = FakePool(workers(1), lambda *_: Answer(line="{}", spent="9.0 s: timing 60%"))
    with RunFolder(tmp_path).open() as folder:
        assert Driver(folder, pool, ask, 60.0).run(Schedule.of(PIECES, (), {}, limit=3))
        assert {event.why for event in folder.events if event.event == "finished"} == {"9.0 s: timing 60%"}
        assert {result.spent for result in folder.results} == {"9.0 s: timing 60%"}


@pytest.mark.usefixtures("as_kda")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_came_just_before_an_interrupt_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    class Signals(FakePool):
        def wait(self, seconds: float) -> list[WorkerReport]:
            found = super().wait(seconds)
            signal.raise_signal(number)
            return found

    with RunFolder(tmp_path).open() as folder:
        pool = Signals(workers(2), lambda *_: Answer(line="{}"))
        assert not Driver(folder, pool, ask, 60.0).run(Schedule.of(PIECES, (), {}, limit=3))
        assert folder.complete_pieces == {"a", "b"}


@pytest.mark.usefixtures("as_kda")
def test_a_second_interrupt_ends_the_waiting_and_so_does_one_that_is_dropped(tmp_path: Path) -> None:
    class Signals(FakePool):
        def wait(self, _seconds: float) -> list[WorkerReport]:
            signal.raise_signal(signal.SIGINT)
            return []

    class Drops(Signals):
        """As in a destructor, in which Python prints the exception and goes on."""

        def wait(self, seconds: float) -> list[WorkerReport]:
            with suppress(KeyboardInterrupt):
                super().wait(seconds)
            return []

    with RunFolder(tmp_path).open() as folder:
        schedule = Schedule.of(PIECES, (), {}, limit=3)
        assert not Driver(folder, Drops(workers(1), None), ask, 60.0).run(schedule)
        with pytest.raises(KeyboardInterrupt):
            Driver(folder, Signals(workers(2), None), ask, 60.0).run(schedule)


@pytest.mark.parametrize(("address", "asked"), [(None, "local"), ("auto", "auto")])
def test_a_ray_of_its_own_is_started_whatever_else_runs_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, address: str | None, asked: str
) -> None:
    seen = []

    def connect(_ray: Any, options: dict[str, Any], _tries: int) -> None:
        seen.append(options["address"])
        raise ConnectionError("not here")

    monkeypatch.setattr(ray_pool, "_connect", connect)
    with pytest.raises(MissingRequirement, match="not here"), ray_pool.cluster(address, 1, in_place()):
        pass
    assert seen == [asked]


def test_a_question_leaves_no_file_behind_however_its_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, gate = tmp_path / "temporary", tmp_path / "gate"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    worker = GpuWorker([str(Path(__file__).parent / "fleet_toy.py")], {}, [])
    piece = Piece(id="a", subject="gate", items=(str(gate),))
    question = Question(order=order(), piece=piece).model_dump_json()
    with ThreadPoolExecutor() as beside:
        answer = beside.submit(worker.run, question)
        while worker._process is None:
            time.sleep(0.01)
        left = list(temporary.iterdir())
        gate.touch()
        assert left == [], "an actor is ended by SIGKILL, which removes nothing"
        assert Answer.model_validate_json(answer.result()).line is not None
    broken = GpuWorker(["-c", "import sys; open(int(sys.argv[1]), 'w').write('{'); sys.exit('no more')"], {}, [])
    assert Answer.model_validate_json(broken.run(question)).failed == "the process ended with 1: no more"


def test_the_modules_that_a_job_needs_exist() -> None:
    """A process skips what it cannot import, so that a wrong name would only make it late."""
    wanted = {name for names in piece_process.NEEDS.values() for name in names} - {"triton", "cutlass.cute"}
    assert [name for name in wanted if find_spec(name) is None] == []


def test_the_process_of_the_next_question_starts_meanwhile_and_its_death_loses_nothing() -> None:
    pid = "import os, sys; sys.stdin.read(); open(int(sys.argv[1]), 'w').write(f'{os.getpid()}\\n')"
    worker = GpuWorker(["-c", pid], {}, [])
    worker.run("{}")
    assert worker._next is not None
    waiting = worker._next[0]
    assert int(worker.run("{}")) == waiting.pid
    dead = worker._next[0]
    dead.kill()
    dead.wait()
    assert int(worker.run("{}")) != dead.pid


# ---- workers that are not alike ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "NVIDIA A100"}, "GPU is NVIDIA A100, 3 of 4 have NVIDIA H200; leave it out"),
        ({"versions": {"driver": "550.9", "torch": "2.13.0"}}, "driver is 550.9, 3 of 4 have 580.1; leave it out"),
        ({"versions": {"driver": "580.1"}}, "torch is absent, 3 of 4 have 2.13.0; leave it out"),
        ({"dirty": True}, "its checkout is at 0000000000 with changes, the driver's at 0000000000"),
        ({"files": {"fake": "cd" * 32}}, "its files of fake are not the driver's"),
    ],
)
def test_an_odd_worker_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    alike = {f"n/{number}": facts(uuid=f"GPU-{number}") for number in range(3)}
    refuse_odd(alike, facts(kind="cpu", gpu=None, versions={}))
    with pytest.raises(UsageError, match="no work was begun") as refused:
        refuse_odd({**alike, "m/0": facts(**change)}, facts())
    assert str(refused.value).splitlines()[1:] == [f"m/0: {words}"]
    assert differing_workers({}, facts()) == {}


def test_of_a_worker_that_came_back_as_something_else_only_the_differences_are_told() -> None:
    assert changed_facts(facts(uuid="GPU-1"), facts()) == ""
    now = facts(cores=8, versions={"driver": "580.1"})
    assert changed_facts(now, facts()) == "cores is 8, was 16; torch is absent, was 2.13.0"


def test_gpus_are_asked_for_where_the_driver_has_none() -> None:
    pool: Any = FakePool([], None)
    with pytest.raises(MissingRequirement, match="expected a GPU that Ray knows of"):
        run_fleet._await_workers(pool, facts(kind="cpu"), "cuda")


def test_a_checkout_without_a_commit_goes_to_no_cluster(task: Task, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--address: expected to be started in a git checkout"):
        pack_checkout(tmp_path, [])


# ---- what neighbours do to walls --------------------------------------------------------------


def test_a_probe_starts_only_the_arms_that_it_reads(task: Task) -> None:
    session = open_session(Request(task=task, device="cpu"))
    several = session.settings.model_copy(update={"against": ("baseline", "upstream_latest"), "beside": ("eager",)})
    assert "limit" in bench._processes(replace(session, kind="cuda"), True, lambda *_: None)
    walls = replace(session, kind="cuda", request=replace(session.request, limits=False))
    assert "limit" not in bench._processes(walls, True, lambda *_: None)
    assert piece_jobs.only_walls(replace(session, settings=several)).arms == ("baseline", "solution")


def test_a_probe_has_a_row_bound_by_the_host_and_the_shortest_that_the_device_bounds() -> None:
    tasks = [find_task(op) for op in ("norm_infer", "norm_scale_shift", "temperature_softmax")]
    every = {row.id: (footprint(task.config.ops[row.op], row), task.op) for task in tasks for row in task.workloads}
    task, (small, large) = interference.probe_rows(tasks, ())
    assert every[large] == min(one for one in every.values() if one[0] >= interference.DEVICE_BOUND)
    assert every[small] == min(one for one in every.values() if one[1] == task.op)
    assert every[large] < max(every.values()), "the largest row takes the oracle long"
    assert interference.probe_rows([task], [small]) == (task, (small,))
    alone, rows = interference.probe_rows(tasks[:1], ())
    assert alone is tasks[0]
    assert len(rows) == 2


def test_without_a_row_that_the_device_bounds_the_largest_is_probed(task: Task) -> None:
    chosen, rows = interference.probe_rows([task], ())
    assert (chosen, rows) == (task, ("small-4x8", "large-512x8"))


def probed(task: Task, longer: Any, device: Any = lambda _worker: 1.0) -> Any:
    """Answers of a probe whose baseline takes `longer(worker, loaded)` times its wall, and that much GPU time."""
    draws = np.random.default_rng(5)

    def say(worker: Worker, question: Question, loaded: int) -> Answer:
        assert question.probe
        assert question.piece is not None
        assert set(question.piece.items) == {"small-4x8", "large-512x8"}
        made = make_record(task)
        floor = Repeat(
            first=samples(10.0 * longer(worker, loaded), draws, 1),
            second=samples(10.0 * longer(worker, loaded), draws, 1),
        )
        rows = []
        for row in made.rows:
            arm = row.arms["baseline"]
            times = arm.summary[Metric.DEVICE]
            slower = times.model_copy(update={"median": times.median * device(worker)})
            arm = arm.model_copy(update={"summary": {**arm.summary, Metric.DEVICE: slower}})
            rows.append(row.model_copy(update={"arms": {**row.arms, "baseline": arm}}))
        machine = made.machine.model_copy(update={"before": gpu_reading().model_copy(update={"uuid": worker.gpu})})
        update = {"noise_floor": {"small-4x8": floor}, "rows": tuple(rows), "machine": machine}
        return Answer(line=ledger.encode(made.model_copy(update=update)).decode())

    return say


@pytest.mark.parametrize(("slower", "published"), [(1.0, True), (1.10, False), (0.9, False)])
def test_interference_beyond_the_noise_floor_is_not_published(task: Task, slower: float, published: bool) -> None:
    pool = FakePool(workers(4), probed(task, lambda _, loaded: slower if loaded > 1 else 1.0))
    shared, standing_out = interference.measure(pool, order(), [task], 60.0)
    assert (shared["n"].neighbours, list(shared["n"].rows), standing_out) == (3, ["fake small-4x8"], [])
    beside = shared["n"].rows["fake small-4x8"].beside
    assert len(beside.first) == len(beside.second) == interference.TURNS
    assert beside.ratio is not None
    assert beside.ratio.estimate == pytest.approx(1 / slower, rel=0.01)
    run = make_record(task)
    assert publishable(task, run) == []
    marked = interference.marked(run, shared["n"])
    assert marked.shared_host == shared["n"]
    problems = publishable(task, marked)
    assert (problems == []) == published, problems
    assert published or "shared-host: walls of fake small-4x8 are" in problems[0]
    assert ledger._decode(ledger.encode(marked), "").shared_host is not None
    assert mismatches(recompute(marked)) == []
    assert marked.shared_host is not None
    ((name, found),) = marked.shared_host.rows.items()
    quiet = found.model_copy(update={"beside": found.beside.model_copy(update={"ratio": found.alone.ratio})})
    unmarked = recompute(marked).model_copy(update={"noisy": ()})
    forged = unmarked.model_copy(update={"shared_host": shared["n"].model_copy(update={"rows": {name: quiet}})})
    assert (mismatches(unmarked) == []) == published
    assert any(line.startswith(f"shared_host.rows.{name}.beside.ratio") for line in mismatches(forged))
    assert any("shared-host: walls of" in line for line in mismatches(forged)) != published


def test_more_neighbours_than_were_measured_keep_a_run_from_being_published(task: Task) -> None:
    pool = FakePool(workers(3), probed(task, lambda *_: 1.0))
    measured = interference.measure(pool, order(), [task], 60.0)[0]["n"]
    first = pool.workers[0]
    assert run_fleet._beside(pool, first, measured) is measured
    pool.workers += workers(4)[3:]
    for known in (measured, None):
        shared = run_fleet._beside(pool, first, known)
        (problem,) = publishable(task, interference.marked(make_record(task), shared))
        assert "shared-host: 3 neighbours worked at the time, and what they do to walls was not measured" in problem
    pool.workers = [first]
    assert run_fleet._beside(pool, first, None) is None


@pytest.mark.parametrize(
    ("answer", "failing", "why"),
    [
        (None, 0, "n/0: died"),
        (Answer(failed="open_row.py:184: TypeError: no"), 0, "n/0: open_row.py:184: TypeError: no"),
        (Answer(refused="no such row", exit_code=2), 0, "n/0: no such row"),
        (Answer(failed="no NVIDIA GPU or driver"), 1, "n/1: no NVIDIA GPU or driver"),
    ],
)
def test_a_probe_that_fails_ends_the_fleet_with_the_reason(
    task: Task, answer: Answer | None, failing: int, why: str
) -> None:
    usual = probed(task, lambda *_: 1.0)
    pool = FakePool(workers(2), lambda worker, *rest: answer if worker.slot == failing else usual(worker, *rest))
    with pytest.raises(ArmFailed, match=f"n: what neighbours do to walls could not be measured: {why}"):
        interference.measure(pool, order(), [task], 60.0)


def test_neighbours_that_failed_are_not_counted_as_measured(task: Task) -> None:
    usual = probed(task, lambda *_: 1.0)
    pool = FakePool(workers(4), lambda worker, *rest: None if worker.slot == 2 else usual(worker, *rest))
    assert interference.measure(pool, order(), [task], 60.0)[0]["n"].neighbours == 2


@pytest.mark.parametrize(("record", "left"), [(True, 2), (False, 4)])
def test_a_recorded_bench_goes_on_with_as_many_workers_as_leave_each_other_alone(
    task: Task, tmp_path: Path, record: bool, left: int
) -> None:
    pool = FakePool(workers(4), probed(task, lambda _, loaded: 1.2 if loaded > 2 else 1.0))
    with RunFolder(tmp_path / "run").open() as folder:
        shared = run_fleet._measured(pool, folder, order(record=record), 60.0)
        assert [worker.name for worker in pool.workers] == [f"n/{slot}" for slot in range(left)]
        assert shared["n"].neighbours == left - 1
        assert (disturbed(shared["n"]) is None) == record
        assert [bool(event.why) for event in folder.events if event.event == "measured"] == [True, False][: 1 + record]


def test_a_worker_that_every_other_one_disturbs_is_left_alone(task: Task, tmp_path: Path) -> None:
    pool = FakePool(workers(4), probed(task, lambda _, loaded: 1.2 if loaded > 1 else 1.0))
    with RunFolder(tmp_path / "run").open() as folder:
        assert run_fleet._measured(pool, folder, order(record=True), 60.0) == {}
    assert [worker.name for worker in pool.workers] == ["n/0"]


def test_where_nothing_runs_beside_nothing_is_measured(task: Task) -> None:
    several = [*workers(1, "a"), *workers(1, "b")]
    assert interference.measure(FakePool(several, lambda *_: pytest.fail("asked")), order(), [task], 60.0) == ({}, [])


def test_a_slow_board_is_named(task: Task) -> None:
    slow = probed(task, lambda *_: 1.0, lambda worker: 1.04 if worker.slot == 2 else 1.0)
    _, standing_out = interference.measure(FakePool(workers(4), slow), order(), [task], 60.0)
    assert standing_out == [
        f"n/2 (GPU-2): {row} takes its GPU 1.040 times the boards' median" for row in ("small-4x8", "large-512x8")
    ]


# ---- into the logs ----------------------------------------------------------------------------


def test_a_bench_is_appended_once_with_its_node_and_attempt(task: Task, tmp_path: Path) -> None:
    run = make_record(task).model_copy(update={"node": "n", "attempt": 2})
    made = Plan(order=order(record=True), pieces=plan(order(), 1), commit="0" * 40, files={})
    for _ in range(2):  # as by --resume, after a kill between the line and the event that tells of it
        with RunFolder(tmp_path / "run").open() as folder:
            folder.keep(result("fake", ledger.encode(run).decode(), attempt=2))
            deliver(folder, made, facts(), whole=True)
    (kept,) = ledger.read(task.ledger)
    assert (kept.run_id, kept.node, kept.attempt, kept.noisy) == (run.run_id, "n", 2, ())
    assert [event.event for event in folder.events].count("recorded") == 1


def test_pieces_of_a_grid_add_up_in_its_log(task: Task, tmp_path: Path) -> None:
    whole = order(Job.VALIDATE, record=True)
    pieces = (Piece(id="fake 1/2", subject="fake"), Piece(id="fake 2/2", subject="fake"))
    made = Plan(order=whole, pieces=pieces, commit="0" * 40, files={})
    with RunFolder(tmp_path / "run").open() as folder:
        for hour, piece, part in ((1, pieces[0], (0, 4)), (2, pieces[1], (5, 9))):
            one = grids.a_run(task, hour, part, node="n", attempt=hour)
            folder.keep(result(piece.id, one.model_dump_json()))
        assert len(deliver(folder, made, facts(), whole=False)) == 2
        assert deliver(folder, made, facts(), whole=True) == []
    assert [(one.node, one.attempt) for one in grid_record.runs(task)] == [("n", 1), ("n", 2)]
    (coverage,) = grids.join(grid_record.runs(task))
    assert len(coverage.checked) == 10


def swept(*rows: Any, **more: Any) -> str:
    return sweeps.record(*rows, partial=True, **more).model_dump_json()


def test_a_joined_sweep_has_its_rows_in_the_order_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have rows from all over the table."""
    found, asked = find_task("group_norm_silu"), list[Any]()
    (done, *_) = tuning_files.recorded(found)
    monkeypatch.setattr("kda_tools.fleet.deliver.join_sweeps", lambda _results, rows, whole: asked.append(rows) or done)
    wanted = order(Job.TUNE, found.op)
    made = Plan(order=wanted, pieces=plan(wanted, 4), commit="0" * 40, files={})
    with RunFolder(tmp_path / "run").open() as folder:
        folder.note("planned", plan=made)
        folder.keep(result(made.pieces[0].id))
        assert deliver(folder, made, facts(), whole=True) == []
    assert asked == [[row.id for row in found.workloads]]


def test_pieces_of_a_sweep_are_one_sweep_whose_rows_know_their_gpu() -> None:
    wide, narrow = sweeps.row(999, (1.0, 2.0, 2.0, 2.0)), sweeps.row(128, (3.0, 1.0, 2.0, 2.0))
    parts = [result("2", swept(wide)), result("1", swept(narrow, utc="2026-11-30T00:00:00Z"), gpu="GPU-1", attempt=2)]
    made = join_sweeps(parts, ["r128", "r999"], whole=True)
    assert [row.row for row in made.tables[0].rows] == ["r128", "r999"]
    assert (made.usable, made.utc, made.seconds) == (True, "2026-11-30T00:00:00Z", 2.0)
    assert [(part.rows, part.gpu, part.attempt) for part in made.parts] == [
        (("r999",), "GPU-0", 1),
        (("r128",), "GPU-1", 2),
    ]
    assert sweeps.chosen(made) == sweeps.chosen(sweeps.record(narrow, wide))
    assert not join_sweeps(parts[:1], ["r128", "r999"], whole=True).usable
    assert not join_sweeps(parts, ["r128", "r999"], whole=False).usable
    with pytest.raises(LedgerError, match="the sweep's parts differ in device: 'NVIDIA A100' and 'NVIDIA H200'"):
        join_sweeps([*parts, result("3", swept(device="NVIDIA A100"))], ["r128", "r999"], whole=True)


def test_a_row_that_an_interrupted_attempt_had_is_there_once() -> None:
    row, again = sweeps.row(1, (1.0, 2.0, 2.0, 2.0)), sweeps.row(1, (1.5, 2.0, 2.0, 2.0))
    parts = [result("1", swept(row), complete=False), result("1", swept(again))]
    made = join_sweeps(parts, ["r1"], whole=True)
    assert made.tables[0].rows == (again,)
    assert [part.rows for part in made.parts] == [(), ("r1",)]


def test_endings_of_the_suite_come_in_the_tables_order() -> None:
    def ended(reason: str) -> dict[str, Any]:
        return {"verdict": "ERROR", "reason": reason, "changed": "", "phases": [["verify", 1.5]]}

    first, second = ADVERSARIES[0].name, ADVERSARIES[1].name
    found = adversary_endings(
        [result("2", json.dumps({second: ended("b")})), result("1", json.dumps({first: ended("a")}))], "cpu"
    )
    assert [(got.adversary.name, got.reason, got.seconds) for got in found] == [(first, "a", 1.5), (second, "b", 1.5)]


def test_a_suite_in_its_log_names_who_ran_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RECORDS", tmp_path / "adversaries.jsonl")
    several = names(Job.ADVERSARIES, [], "cuda")
    suite = order(Job.ADVERSARIES, *several, record=True)
    made = Plan(order=suite, pieces=plan(suite, 2), commit="0" * 40, files={})
    versions = dict.fromkeys(page.VERSIONS, "1")
    ended = {"verdict": "ERROR", "reason": "", "changed": "", "phases": []}
    for _ in range(2):
        with RunFolder(tmp_path / "run").open() as folder:
            if folder.plan is None:
                folder.note("planned", plan=made)
            for number, piece in enumerate(made.pieces):
                line = json.dumps(dict.fromkeys(piece.items, ended))
                folder.keep(result(piece.id, line, gpu=f"GPU-{number}", attempt=2))
            deliver(folder, made, facts(versions=versions), whole=True)
    (kept,) = page.read(page.RECORDS)
    assert [(part.names, part.gpu, part.node, part.attempt) for part in kept.parts] == [
        (piece.items, f"GPU-{number}", "n", 2) for number, piece in enumerate(made.pieces)
    ]


# ---- what is said -----------------------------------------------------------------------------


def test_the_cost_counts_lost_attempts(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open() as folder:
        lost = folder.note("lost", piece="a", attempt=2, worker="n/0", seconds=3.0, why="died")
        folder.keep(result("a", seconds=5.0))
        assert busy_s(folder.events) == 8.0
        assert summary(folder.events, 2, 5.0, "cuda") == "2 GPUs, 5 s: 8 GPU-seconds of work, 80% of 10; 1 attempt lost"
        assert event_line(lost) == "a lost on n/0, attempt 2, 3 s: died"
