"""The real judge with real worker processes, on the CPU: what a run keeps, loses and says. See adversaries/, too."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from core.judge.tests.conftest import listen_to_interrupts
from core.judge.tests.processes import until, workers_of
from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.arm_worker import Worker
from kda_judge.arms.protocol import ArmSpec
from kda_judge.bench import run
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Metric, Verdict
from kda_judge.judge import checker
from kda_judge.judge.judge import Judge
from kda_judge.session import Request, frozen_rows, open_session
from kda_tools.lab.grid.grid_rows import grid_session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def bench(task: Task, arm: str, rows: str, progress=lambda row, phase: None, generations=2):
    """One run of `arm` on the rows that match."""
    if arm != "solution":
        config = task.path / "config.toml"
        table = f'\n[arms.{arm}]\nmodule = "faulty.{arm}"\ndevices = ["cpu"]\n'
        config.write_text(config.read_text() + table)
    fresh = Task(task.path)
    session = open_session(Request(task=fresh, rows=[f"{rows}*"], subject=arm, device="cpu", generations=generations))
    return run(session, frozen_rows(session), measure=True, progress=progress)


def test_a_run_without_a_gpu_keeps_no_time(toy):
    record = bench(toy, "solution", "*")
    assert {row.id for row in record.rows} == {"out-64x16", "inplace-64x16"}
    assert all(not arm.samples and not arm.summary for row in record.rows for arm in row.arms.values())
    assert record.headline is None
    checks = [row.arms["solution"].correctness.checks for row in record.rows]
    # 3 seeds x 3 families, slices, one more per later generation, every family in the audit, one per timed sample.
    assert checks == [9 + 1 + 1 + 3 + 2] * 2


TICKING = """


import pathlib, threading, time

CALLED = threading.Event()


def tick():
    while True:
        CALLED.wait()
        with pathlib.Path({log!r}).open("a") as file:
            print({name!r}, file=file)
        time.sleep(0.01)


threading.Thread(target=tick, daemon=True).start()
_axpy = axpy


def axpy(x, y, *, factor):
    CALLED.set()
    time.sleep(0.2)
    CALLED.clear()
    return _axpy(x, y, factor=factor)
"""


MEETING = """
import time
from pathlib import Path


def meet(where):
    here = Path({folder!r})
    (here / f"{{where}}-{name}").touch()
    until = time.monotonic() + 20
    while len(list(here.glob(f"{{where}}-*"))) < 2:
        if time.monotonic() > until:
            raise RuntimeError(f"{name} is alone at the {{where}}")
        time.sleep(0.01)
"""


def test_arms_import_side_by_side(toy, tmp_path):
    """Each waits for the other one, so that none gets on where they take turns."""
    for name in ("solution", "baseline"):
        path = toy.path / name / "__init__.py"
        path.write_text(path.read_text() + MEETING.format(folder=str(tmp_path), name=name) + '\n\nmeet("import")\n')
    assert bench(toy, "solution", "out", generations=1).rows[0].verdict is Verdict.CORRECT
    assert len(list(tmp_path.glob("import-*"))) == 2


def test_first_calls_are_made_in_turn_while_the_others_are_held(toy, tmp_path, monkeypatch):
    """Upstream's kernels choose configurations by timing them there, and what another arm does would mislead them."""
    log = tmp_path / "log"
    for name in ("solution", "baseline"):
        path = toy.path / name / "__init__.py"
        path.write_text(path.read_text() + TICKING.format(log=str(log), name=name))
    opened = Judge._open

    @contextmanager
    def warmed(self, notes, slices=False, cold=False):
        with opened(self, notes, slices, cold) as case:
            log.write_text("")
            self._warm(case, notes)
            log.rename(tmp_path / "warm")
            yield case

    monkeypatch.setattr(Judge, "_open", warmed)
    assert bench(toy, "solution", "out", generations=1).rows[0].verdict is Verdict.CORRECT
    names = (tmp_path / "warm").read_text().split()
    assert [name for name, _ in groupby(names)] in (["solution", "baseline"], ["baseline", "solution"])
    assert min(Counter(names).values()) > 5


def test_a_crash_costs_one_row_and_the_next_one_gets_a_new_worker(toy):
    faulty = toy.path / "faulty" / "segfaults.py"
    faulty.write_text(faulty.read_text() + "\n\nfrom ..baseline import axpy_\n")
    record = bench(toy, "segfaults", "*")
    out, inplace = sorted(record.rows, key=lambda row: row.id, reverse=True)
    assert (out.verdict, inplace.verdict) == (Verdict.ERROR, Verdict.CORRECT)
    assert inplace.arms["segfaults"].restarts == 1
    assert inplace.arms["segfaults"].correctness.passed


def test_an_error_beyond_twice_the_opponents_is_incorrect(toy):
    (toy.path / "faulty" / "coarse.py").write_text(
        "def axpy(x, y, *, factor):\n    return factor * x + y + 9e-6 * (1 + 0 * x)\n"
    )
    row = bench(toy, "coarse", "out").rows[0]
    assert row.verdict is Verdict.INCORRECT
    assert re.search(r"more than twice the baseline's .* for rounding .*\[inputs: normal, seed \d+\]", row.reason)


@pytest.mark.parametrize(("roundings", "verdict"), [(None, Verdict.CORRECT), ({}, Verdict.INCORRECT)])
def test_the_last_bit_of_a_float32_decides_nothing(toy, monkeypatch, roundings, verdict):
    (toy.path / "faulty" / "next.py").write_text(
        "import torch\n\n\ndef axpy(x, y, *, factor):\n"
        "    return torch.nextafter(factor * x + y, torch.full_like(x, torch.inf))\n"
    )
    if roundings is not None:
        monkeypatch.setattr(checker, "INPUT_ROUNDINGS", roundings)
    assert bench(toy, "next", "out").rows[0].verdict is verdict


# ---- slices ---------------------------------------------------------------------------------------

WHERE = """
import pathlib

import torch

FOUND = pathlib.Path(__file__).parent / "found"


def axpy(x, y, *, factor):
    with FOUND.open("a") as file:
        print(x.data_ptr() % 256, y.data_ptr() % 256, x.stride(), y.stride(), file=file)
    if {refuses} and x.data_ptr() % 16:
        raise ValueError("unaligned")
    return factor * x + y
"""


def bench_slices(task, key="", refuses=False, subject="where", upstream=False):
    """A run of an arm that writes down where its inputs lie, as subject or as opponent."""
    (task.path / "faulty" / "where.py").write_text(WHERE.format(refuses=refuses))
    config = task.path / "config.toml"
    table = '\n[arms.where]\nmodule = "faulty.where"\ndevices = ["cpu"]\n'
    config.write_text(config.read_text().replace("[ops.axpy]", f"[ops.axpy]\n{key}") + table)
    fresh = Task(task.path)
    against = "eager" if subject == "where" else "where"
    session = open_session(
        Request(task=fresh, rows=["out*"], subject=subject, against=[against], device="cpu", generations=2)
    )
    if upstream:
        arms = {**session.config.arms, "where": session.config.arms["where"].model_copy(update={"upstream": "some"})}
        session = replace(session, config=session.config.model_copy(update={"arms": arms}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda_judge.bench.arm_spec", _without_upstream)
        row = run(session, frozen_rows(session), measure=True, progress=lambda *_: None).rows[0]
    notes = (task.path / "faulty" / "found").read_text().splitlines()
    return row, [note for note in notes if not note.startswith("0 0 ")]


def _without_upstream(session, name):
    return ArmSpec(
        name=name, folder=str(session.request.task.path), module=session.config.arms[name].module, device="cpu"
    )


def test_one_verified_call_is_of_slices(toy):
    row, unaligned = bench_slices(toy)
    assert row.verdict is Verdict.CORRECT
    assert unaligned == ["4 4 (16, 1) (48, 1)"]  # float32: one element, with the row's own strides


@pytest.mark.parametrize(
    "other", [{"key": 'takes_no_slices = "padded by the framework"'}, {"subject": "solution"}, {"upstream": True}]
)
def test_who_is_not_asked_about_slices(toy, other):
    row, unaligned = bench_slices(toy, refuses=True, **other)
    assert (row.verdict, unaligned) == (Verdict.CORRECT, [])


def test_a_subject_that_refuses_slices_fails(toy):
    row, _ = bench_slices(toy, refuses=True)
    assert row.verdict is Verdict.ERROR
    assert "ValueError: unaligned" in row.reason


# ---- a grid: about the subject alone ------------------------------------------------------------

WRONG_ON_OFFSET = "def axpy(x, y, *, factor):\n    return factor * x + y + (10 if x.mean() > 32 else 0)\n"
RIGHT = "def axpy(x, y, *, factor):\n    return factor * x + y\n"
COARSE_ON_MIXED = (
    "def axpy(x, y, *, factor):\n    return factor * x + y + (5e-4 if abs(x).max() > 9 and abs(x.mean()) < 32 else 0)\n"
)
WRONG_ON_MIXED = COARSE_ON_MIXED.replace("5e-4", "5.0")


def grid(task, solution, eager, families=None, production=False, **how):
    """One row of a regression grid."""
    (task.path / "solution" / "__init__.py").write_text(solution)
    (task.path / "baseline" / "__init__.py").write_text(eager)
    fresh = Task(task.path)
    session = grid_session(open_session(Request(task=fresh, rows=["out*"], device="cpu")))
    if families:
        session = replace(session, settings=session.settings.model_copy(update={"families": families}))
    rows = tuple(row.model_copy(update={"production": production}) for row in frozen_rows(session))
    return run(session, rows, measure=False, progress=lambda row, phase: None, **how)


def test_a_grids_opponent_may_be_outside_the_tolerance(toy):
    row = grid(toy, RIGHT, WRONG_ON_OFFSET).rows[0]
    assert row.verdict is Verdict.CORRECT
    assert re.search(r"correct on the CPU.*; eager is not: output 'out': .* outside tolerance.*offset", row.reason)
    assert not row.arms["eager"].correctness.passed
    # Every draw, of the opponent too; the subject's slices besides.
    assert {name: arm.correctness.checks for name, arm in row.arms.items()} == {"solution": 4, "eager": 3}


def test_a_grid_is_drawn_from_seeds_that_no_file_names(toy):
    """An arm may know the published seeds; a failure names the one that was drawn."""
    published = open_session(Request(task=toy, device="cpu")).settings.seeds
    records = [grid(toy, WRONG_ON_OFFSET, RIGHT) for _ in range(2)]
    drawn = [seed for record in records for seed in record.settings.seeds]
    assert len({*drawn, *published}) == 2 + len(published)
    for record, seed in zip(records, drawn, strict=True):
        assert f"[inputs: offset, seed {seed}]" in record.rows[0].reason


REFUSES_OFFSET = (
    "def axpy(x, y, *, factor):\n"
    "    if x.mean() > 32:\n"
    "        raise ValueError('too far')\n"
    "    return factor * x + y\n"
)


def test_a_grids_opponent_may_refuse(toy):
    row = grid(toy, RIGHT, REFUSES_OFFSET).rows[0]
    assert row.verdict is Verdict.CORRECT
    assert re.search(r"correct on the CPU.*; eager is not: .*ValueError: too far", row.reason)
    assert not row.arms["eager"].correctness.passed
    assert {name: arm.correctness.checks for name, arm in row.arms.items()} == {"solution": 4, "eager": 2}
    assert row.arms["eager"].restarts == 0


def test_a_subject_may_not(toy):
    assert grid(toy, REFUSES_OFFSET, RIGHT).rows[0].verdict is Verdict.ERROR
    assert grid(toy, RIGHT, REFUSES_OFFSET, production=True).rows[0].verdict is Verdict.ERROR


@pytest.mark.parametrize("fails", ["__import__('os')._exit(3)", "raise RuntimeError('CUDA error: misaligned address')"])
def test_a_grids_opponent_may_not_crash(toy, fails):
    assert grid(toy, RIGHT, f"def axpy(x, y, *, factor):\n    {fails}\n").rows[0].verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("solution", "words"),
    [(WRONG_ON_MIXED, "elements outside tolerance"), (COARSE_ON_MIXED, "more than twice the baseline's")],
)
def test_a_wrong_opponent_hides_nothing_of_the_subject(toy, solution, words):
    """The draws behind the one that the opponent fails are compared with the oracle, and with the opponent."""
    row = grid(toy, solution, WRONG_ON_OFFSET).rows[0]
    assert row.verdict is Verdict.INCORRECT
    assert row.reason.startswith("solution: ")
    assert words in row.reason
    assert "[inputs: mixed" in row.reason


def test_a_wrong_opponent_bounds_nothing(toy):
    """It is off by 1.5e-5, too much for small elements; the subject by more, where elements are large."""
    eager = RIGHT.replace("+ y", "+ y + 1.5e-5")
    solution = RIGHT.replace("factor * x + y", "(factor * x + y) * (1 + 7e-6)")
    row = grid(toy, solution, eager, families=("normal",)).rows[0]
    own, other = (row.arms[name].correctness.outputs[0].max_abs for name in ("solution", "eager"))
    assert own > 2 * other + 1e-6
    assert row.verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    ("eager", "production", "words"),
    [
        (WRONG_ON_OFFSET, True, "elements outside tolerance"),
        (RIGHT.replace("    return", "    y += 1\n    return"), False, "input 'y' was changed"),
        (RIGHT.replace("+ y", "+ y.double()"), False, "expected dtype float32, got float64"),
    ],
)
def test_what_no_opponent_may_do(toy, eager, production, words):
    """Be wrong on a row of production, or be broken rather than inexact."""
    row = grid(toy, RIGHT, eager, production=production).rows[0]
    assert row.verdict is Verdict.INCORRECT
    assert row.reason.startswith("eager: ")
    assert words in row.reason


@pytest.mark.parametrize(("limit_s", "rows"), [(0.0, 1), (600.0, 2)])
def test_a_limit_of_time_begins_no_other_row(toy, limit_s, rows):
    session = grid_session(open_session(Request(task=toy, device="cpu")))
    record = run(session, frozen_rows(session), measure=False, progress=lambda row, phase: None, limit_s=limit_s)
    assert [row.verdict for row in record.rows] == rows * [Verdict.CORRECT]
    assert not record.partial


def test_a_row_that_a_grid_did_not_finish_is_absent(toy):
    def interrupt(row, phase):
        if row.startswith("inplace"):
            raise KeyboardInterrupt

    session = grid_session(open_session(Request(task=toy, device="cpu")))
    record = run(session, frozen_rows(session), measure=False, progress=interrupt)
    assert [row.id for row in record.rows] == ["out-64x16"]
    assert record.partial


def test_interrupt_ends_the_workers_and_keeps_what_was_measured(toy):
    started = []

    def interrupt(row, phase):
        started.append((row, phase))
        if phase == "audit" and row.startswith("inplace"):
            raise KeyboardInterrupt

    record = bench(toy, "solution", "*", interrupt)
    assert record.partial
    assert {row.id: row.verdict for row in record.rows} == {
        "out-64x16": Verdict.CORRECT,
        "inplace-64x16": Verdict.INVALID,
    }
    assert "interrupted" in record.rows[1].reason
    assert workers_of(toy) == []


@pytest.mark.parametrize(
    ("dtype", "kept"), [("bfloat16", torch.bfloat16), ("int32", torch.float64), ("float8_e4m3fn", torch.float64)]
)
def test_what_was_expected_before_is_remembered_as_small_as_an_output(dtype, kept):
    values = torch.tensor([1.0, 3.0, 448.0], dtype=torch.float64)
    assert checker.rounded(values, dtype).dtype is kept
    assert torch.equal(checker.rounded(values, dtype).double(), values)


@pytest.mark.parametrize(("reserved", "returned"), [(34, []), (36, [True])])
def test_memory_that_the_oracle_used_is_for_the_arms(monkeypatch, reserved, returned):
    """More than a 32nd of the GPU's 160."""
    cuda, given = torch.cuda, []
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=160))
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(cuda, "memory_allocated", lambda _: 30)
    monkeypatch.setattr(cuda, "empty_cache", lambda: given.append(True))
    checker.give_back("cuda:0")
    checker.give_back("cpu")
    assert given == returned


@pytest.mark.parametrize(("reserved", "given_back"), [(34, 0), (36, 1)])
def test_memory_that_an_arm_has_cached_is_for_the_oracle(reserved, given_back):
    """PyTorch keeps the memory of an eager chain's intermediate results, ten times the output's."""
    calls: list[bool] = []
    cuda = SimpleNamespace(
        memory_reserved=lambda: reserved, memory_allocated=lambda: 30, empty_cache=lambda: calls.append(True)
    )
    worker = object.__new__(Worker)
    worker._torch, worker._spare_bytes = SimpleNamespace(cuda=cuda), 5
    worker._give_back()
    assert len(calls) == given_back


@pytest.mark.parametrize("at", ["verify", "audit"])
def test_a_row_that_the_gpu_has_no_memory_for_does_not_end_the_run(toy, monkeypatch, at):
    judge_of = checker.ask_oracle
    phases: list[str] = []

    def oracle(reference, op, row, values):
        if row.id.startswith("out") and phases[-1] == at:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.88 GiB. GPU 0 has less. Of the")
        return judge_of(reference, op, row, values)

    monkeypatch.setattr(checker, "ask_oracle", oracle)
    record = bench(toy, "solution", "*", lambda _, phase: phases.append(phase.split()[0]))
    found = {row.id: (row.verdict, row.reason) for row in record.rows}
    assert found["inplace-64x16"][0] is Verdict.CORRECT
    assert found["out-64x16"][0] is Verdict.ERROR
    assert "this GPU has too little memory to judge the row: CUDA out of memory. Tried to" in found["out-64x16"][1]
    assert not record.partial
    assert workers_of(toy) == []


def test_an_interrupt_blames_no_arm(toy, monkeypatch):
    """The arm that is interrupted still owes an answer, which would fit no later question."""
    ask = ArmProcess.ask

    def interrupted(self, command, *given, **named):
        if command != "wall":
            return ask(self, command, *given, **named)
        self.post(command, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(ArmProcess, "ask", interrupted)
    row = bench(toy, "solution", "out").rows[0]
    assert row.reason == "interrupted before every check of this row was made"
    assert [arm.correctness.failure for arm in row.arms.values()] == [None] * len(row.arms)


def test_ctrl_c_on_the_command_line_exits_130(checkout):
    path = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    path.write_text(path.read_text() + "\n\nimport time\n\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kda_tools", "bench", "axpy", "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=listen_to_interrupts,
    )
    assert until(lambda: bool(workers_of(Task(path.parents[1]))), seconds=60)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert workers_of(Task(path.parents[1])) == []


def test_a_faulty_opponent_is_named_and_not_the_subject(toy):
    path = toy.path / "baseline" / "__init__.py"
    path.write_text(path.read_text().replace("factor * x + y", "factor * x - y"))
    record = bench(toy, "solution", "out")
    assert record.rows[0].verdict is Verdict.INCORRECT
    assert record.rows[0].reason.startswith("eager: output 'out'")


def test_the_judge_does_not_import_an_arm(toy):
    before = set(sys.modules)
    bench(toy, "solution", "out")
    new = {name for name in set(sys.modules) - before if name.startswith(toy.folder)}
    assert not any("solution" in name or "baseline" in name for name in new), new


def test_metrics_of_the_protocol_were_all_asked_for(toy, monkeypatch):
    """On a CPU the timed commands run too, although nothing of them is kept."""
    from kda_judge.judge import verdict

    seen = []
    original = verdict._arm
    monkeypatch.setattr(verdict, "_arm", lambda arm, *rest: seen.append(dict(arm.samples)) or original(arm, *rest))
    bench(toy, "solution", "out")
    assert all(set(samples) == {Metric.WALL, Metric.LATENCY} for samples in seen)
    assert all(len(generations) == 2 for samples in seen for generations in samples.values())
