"""What stands beside the deciding times: distances of outputs, cold inputs, portable arms, rows as they are timed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kda_judge.arms import arm_import
from kda_judge.arms.arena import as_bits
from kda_judge.arms.arm_import import REPLAYER, callable_of, import_arm
from kda_judge.bench import run
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import PORTABLE_ARM, REPLAYED_ARM, Distance, Metric, Verdict
from kda_judge.judge.correctness import distance, further
from kda_judge.judge.open_row import COLD_SETS, Case, footprint, traffic
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.verdict import result
from kda_judge.session import Request, _beside, _with_ports, arm_spec, frozen_rows, open_session

PORT = "from functools import wraps\n\n\ndef axpy(x, y, *, factor):\n    return factor * x + y\n"
LAUNCHER = "def replay_launches(function):\n    return lambda *a, **k: ('replayed', function(*a, **k))\n"


# ---- distances ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neighbours_are_one_apart_and_both_zeros_none(dtype):
    one = torch.tensor([1.0, 2.0, 0.0, -3.0], dtype=dtype)
    other = one.clone()
    word = {2: torch.int16, 4: torch.int32}[one.element_size()]
    other.view(word)[0] += 1
    assert distance("y", one, one) == Distance(output="y", equal=1.0, near=1.0, ulps=0)
    assert distance("y", one, other) == Distance(output="y", equal=0.75, near=1.0, ulps=1)
    other.view(word)[1] += 3
    assert distance("y", one, other) == Distance(output="y", equal=0.5, near=0.75, ulps=3)
    signed = torch.tensor([1.0, 2.0, -0.0, -3.0], dtype=dtype)
    assert distance("y", one, signed) == Distance(output="y", equal=0.75, near=1.0, ulps=0)


def test_a_distance_across_zero_counts_every_number_between():
    tiny = torch.finfo(torch.bfloat16).tiny
    one, other = torch.tensor([tiny], dtype=torch.bfloat16), torch.tensor([-tiny], dtype=torch.bfloat16)
    assert distance("y", one, other).ulps == 2 * int(one.view(torch.int16))


def test_the_worst_of_two_draws_is_kept_number_by_number():
    one, other = Distance(output="y", equal=0.9, near=0.95, ulps=7), Distance(output="y", equal=0.8, near=1.0, ulps=2)
    assert further(None, one) == one
    assert further(one, other) == Distance(output="y", equal=0.8, near=0.95, ulps=7)


def test_a_run_says_how_far_the_subject_is_from_its_opponents(toy):
    """One unit in the last place in one element of the 128 of the shrunken row."""
    (toy.path / "solution" / "__init__.py").write_text(
        "import torch\n\n\ndef axpy(x, y, *, factor):\n    out = factor * x + y\n"
        "    out.view(torch.int32)[0, 0] += 1\n    return out\n"
    )
    session = open_session(Request(task=Task(toy.path), rows=["out*"], device="cpu", generations=1))
    row = run(session, frozen_rows(session)).rows[0]
    (found,) = row.arms["eager"].distance
    assert (found.output, found.equal, found.near, found.ulps) == ("out", 1 - 1 / 128, 1.0, 1)
    assert row.arms["solution"].distance == ()


# ---- cold inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_cold_sets_all_hold_the_values_and_hot_times_use_the_first_alone(toy, inplace):
    name = "axpy_" if inplace else "axpy"
    row = next(row for row in Task(toy.path).workloads if row.op == name)
    strided = TensorSpec(shape=(64, 16), dtype="float32", stride=(40, 1))
    row = row.model_copy(update={"inputs": {**row.inputs, "x": strided}})
    op = toy.config.ops[name]
    case = Case.open(op, row, "cpu", traffic(op, row, None), beyond=(1000, 2000))
    try:
        assert (len(case.spec.sets), case.spec.hot) == (3, 1)
        values = {key: torch.randn(spec.shape) for key, spec in row.inputs.items()}
        before = [{key: case.arena.view(place).clone() for key, place in places.items()} for places in case.input_sets]
        case.write(values)
        held = [{key: case.arena.view(place) for key, place in places.items()} for places in case.input_sets]
        for number, (now, was) in enumerate(zip(held[:3], before, strict=False)):
            wanted = was if number else values
            assert all(torch.equal(as_bits(now[key]), as_bits(wanted[key])) for key in values)
        case.write(values, cold=True)
        assert len(held) == 3 + inplace
        assert all(torch.equal(one[key], values[key]) for one in held for key in values)
        assert case.arena.broken_guard() is None
        assert not any(case.arena.gap_changed(place) for places in case.input_sets for place in places.values())
    finally:
        case.close()


def test_a_small_row_has_few_cold_sets_and_other_memory_that_is_read_between(toy):
    """By its size alone it would have 20002 sets, whose list no worker takes, and whose guards take seconds."""
    row = next(row for row in Task(toy.path).workloads if row.op == "axpy")
    op = toy.config.ops["axpy"]
    for cache, touched, sets, flush in ((1_000_000, 100, COLD_SETS, 2_000_000), (1000, 200, 12, 0), (0, 100, 1, 0)):
        case = Case.open(op, row, "cpu", traffic(op, row, None), beyond=(cache, touched))
        try:
            assert (len(case.spec.sets), case.spec.flush) == (sets, flush)
        finally:
            case.close()


# ---- the portable arms ----------------------------------------------------------------------------


@pytest.fixture
def port(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "__init__.py").write_text(PORT)
    return folder


def test_a_pin_with_a_launcher_makes_a_second_portable_arm(toy, port):
    assert REPLAYED_ARM not in _with_ports(toy, {PORTABLE_ARM: port}).arms
    (toy.path / "pinned.sha256").write_text(f"{'ab' * 32}  {REPLAYER}\n")
    pin = (
        '[upstream."sglang-9"]\npackage = "sglang"\nversion = "9"\n'
        f'wheel_sha256 = "{"cd" * 32}"\npython = "312"\nplatform = "any"\nlicence = "-"\nfiles = "pinned.sha256"\n'
    )
    config = toy.path / "config.toml"
    config.write_text(f"{config.read_text()}\n{pin}")
    fresh = Task(toy.path)
    arms = _with_ports(fresh, {PORTABLE_ARM: port}).arms
    assert (arms[REPLAYED_ARM].upstream, arms[REPLAYED_ARM].devices) == ("sglang-9", ("cuda",))
    assert REPLAYED_ARM not in _with_ports(fresh, {"other": port}).arms
    assert _beside(_with_ports(fresh, {PORTABLE_ARM: port}), "cpu") == []
    with pytest.raises(UsageError, match="expected a name that no arm of the task has"):
        _with_ports(fresh, {REPLAYED_ARM: port})


def test_the_replayed_arm_is_the_export_under_upstreams_launcher(toy, port, monkeypatch):
    session = open_session(Request(task=toy, rows=["out*"], device="cpu", ports={PORTABLE_ARM: port}))
    config = session.config.model_copy(
        update={"arms": {**session.config.arms, REPLAYED_ARM: session.config.arms[PORTABLE_ARM]}}
    )
    spec = arm_spec(replace(session, config=config), REPLAYED_ARM)
    assert (spec.folder, spec.replayed) == (str(port), True)
    assert not arm_spec(session, PORTABLE_ARM).replayed
    launcher: dict = {}
    exec(LAUNCHER, launcher)
    monkeypatch.setattr(arm_import, "replay_launches", lambda: launcher["replay_launches"])
    called = callable_of(import_arm(spec), spec, "axpy")
    assert called(torch.ones(2), torch.ones(2), factor=2.0)[0] == "replayed"


# ---- a first look, and rows as they are timed ------------------------------------------------------


def test_a_quick_run_is_one_generation_of_one_seed(toy):
    settings = open_session(Request(task=toy, device="cpu", quick=True)).settings
    assert (settings.quick, settings.generations, len(settings.seeds)) == (True, 1, 1)
    assert settings.families == open_session(Request(task=toy, device="cpu")).settings.families


def test_rows_are_told_once_in_the_last_generation(toy):
    told = []
    session = open_session(Request(task=toy, device="cpu", generations=2))
    record = run(session, frozen_rows(session), timed=told.append)
    assert [row.id for row in told] == [row.id for row in record.rows]
    assert {row.verdict for row in told} == {Verdict.CORRECT}


def test_before_the_last_checks_a_row_is_not_blamed_for_kernels_nobody_counted(toy):
    session = open_session(Request(task=toy, rows=["out*"], device="cpu"))
    row = Workload.model_validate(frozen_rows(session)[0].model_dump())
    op = toy.config.ops[row.op]

    def timed() -> ArmNotes:
        notes = ArmNotes(checks=1)
        notes.samples = {metric: [[10.0] * 12] for metric in (Metric.WALL, Metric.EVENTS, Metric.DEVICE)}
        return notes

    arms = {name: timed() for name in ("solution", "eager", "limit")}
    notes = RowNotes(row, traffic(op, row, None), footprint(op, row), arms, complete=True)
    assert result(notes, session.settings, "cuda", 1 << 26, counted=False).verdict is Verdict.NOT_FASTER
    found = result(notes, session.settings, "cuda", 1 << 26)
    assert (found.verdict, found.reason) == (Verdict.INVALID, "solution: the profiler counted nothing")


def test_a_fleets_node_and_attempt_are_in_the_record(toy):
    record = run(Request(task=toy, rows=["out*"], device="cpu", generations=1, node="node-7", attempt=2))
    assert (record.node, record.attempt) == ("node-7", 2)
