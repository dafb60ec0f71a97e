"""Ways around the judge, and ways to lose a run, that were open once: each must stay closed."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from hashlib import sha256
from importlib._bootstrap_external import _code_to_timestamp_pyc
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.judge.tests.conftest import listen_to_interrupts
from core.judge.tests.processes import until, workers_of
from kda_judge.arms.arm_process import ArmProcess, processes
from kda_judge.arms.arm_worker import Memory, _newest
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import ArmSpec, Place
from kda_judge.bench import run
from kda_judge.contract.errors import KdaError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import Settings, Verdict
from kda_judge.judge import checker, idle_arms, replaced_inputs, verdict
from kda_judge.judge.checker import Checker
from kda_judge.judge.idle_arms import busy, watched
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.spent import Spent
from kda_judge.session import Request, frozen_rows, open_session

ENV = {**os.environ, "PYTHONPATH": import_path()}
RUN = ("bench", "axpy", "--device", "cpu", "--rows", "out*", "--generations", "1")


def bench(task, source, rows="out", measure=True, against=()):
    (task.path / "faulty" / "arm.py").write_text(source)
    config = task.path / "config.toml"
    config.write_text(config.read_text() + '\n[arms.arm]\nmodule = "faulty.arm"\ndevices = ["cpu"]\n')
    fresh = Task(task.path)
    request = Request(task=fresh, rows=[f"{rows}*"], subject="arm", against=[*against], device="cpu", generations=1)
    session = open_session(request)
    return run(session, frozen_rows(session), measure=measure, progress=lambda *_: None)


def kda(task, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kda_tools", *arguments],
        cwd=task.path.parents[1],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )


GOOD = "def axpy(x, y, *, factor):\n    return factor * x + y\n"
SLOW = "import time\ndef axpy(x, y, *, factor):\n    first = factor * x\n    time.sleep({})\n    return first + y\n"
"""Reads its inputs one after the other, and takes its time between them."""


def test_validate_on_a_gpu_is_not_invalid(toy):
    notes = RowNotes(
        toy.workloads[0], 1, 1, {"solution": ArmNotes(checks=9), "eager": ArmNotes(checks=9)}, complete=True
    )
    settings = Settings(
        subject="solution",
        against=("eager",),
        generations=3,
        samples=12,
        target_sample_us=1,
        seeds=(1,),
        families=(),
        cold=False,
        isolate="none",
    )
    found = verdict.result(notes, settings, "cuda", 1, timed=False)
    assert (found.verdict, found.reason) == (
        Verdict.CORRECT,
        "correct; not timed, as only correctness was asked for",
    )


def test_the_opponents_outputs_are_not_in_the_arena(toy):
    """`validate`: the arm computes nothing and stops the copy; what the opponent left is compared instead."""
    record = bench(
        toy,
        "import torch\ntorch.Tensor.copy_ = lambda self, *a, **k: self\n"
        "def axpy(x, y, *, factor):\n    return torch.zeros(x.shape)\n",
        measure=False,
    )
    assert record.rows[0].verdict is Verdict.INCORRECT


def test_one_arms_damage_is_not_the_others(toy):
    record = bench(
        toy,
        "def axpy(x, y, *, factor):\n    out = factor * x + y\n"
        "    y.as_strided((y.shape[0] - 1, 32), (48, 1), 16).zero_()\n    return out\n",
        measure=False,
    )
    assert record.rows[0].arms["eager"].correctness.passed


@pytest.mark.parametrize("seconds", ["2e-3", "5e-3", "6e-2"])
def test_inputs_that_change_during_a_call_are_not_held_against_it(toy, seconds, monkeypatch):
    compared = []
    monkeypatch.setattr(Checker, "compare", _spied(Checker.compare, compared))
    assert bench(toy, SLOW.format(seconds)).rows[0].verdict is Verdict.CORRECT
    # Twice of both arms; one whose calls are too long for a loop is not tried.
    assert len(compared) - (2 * (9 + 3 + 1) + 1) == (2 if seconds == "6e-2" else 4)


def test_one_call_that_was_held_up_is_no_proof(toy, monkeypatch):
    """Wrong in two trials and right in two: as a call is that began before the new values and ended last."""
    compared = []
    calls = 2 * (9 + 1 + 3) + 1  # compared before: of both arms in draws, sample and audit; of one on slices
    monkeypatch.setattr(Checker, "compare", _spied(Checker.compare, compared, wrong=(calls, calls + 1)))
    assert bench(toy, GOOD).rows[0].verdict is Verdict.CORRECT
    assert compared[calls : calls + 4] == ["late", "late", None, None]


def test_a_claim_of_more_time_than_passed_costs_its_row_and_not_the_run(toy):
    longer = (
        "import sys\nworker = sys.modules['kda_judge.arms.arm_worker']\ntimed = worker.Timed\n"
        "worker.Timed = lambda **facts: timed(**{**facts, 'total_us': 3 * facts['total_us']})\n"
    )
    found = bench(toy, longer + GOOD).rows[0]
    assert found.verdict is Verdict.INVALID
    assert re.fullmatch("arm 'arm' (wall|latency): claims more time than passed", found.reason)


def test_bytecode_beside_the_oracle_is_not_what_judges(toy):
    """An arm of an earlier run may have left it there, with the source's date and size; no hash covers it."""
    path = toy.path / "bench" / "reference.py"
    facts, source = path.stat(), path.read_text()
    assert source.count("factor * x") == 1
    cache = Path(cache_from_source(str(path)))
    cache.parent.mkdir(exist_ok=True)
    wrong = compile(source.replace("factor * x", "0 * x"), str(path), "exec")
    cache.write_bytes(_code_to_timestamp_pyc(wrong, int(facts.st_mtime), facts.st_size))
    assert bench(toy, GOOD, measure=False).rows[0].verdict is Verdict.CORRECT


UPSTREAM = b"def axpy(x, y, *, factor):\n    return factor * x + y\n"
PINNED = """
[upstream."toyup-1.0"]
package = "toyup"
version = "1.0"
wheel_sha256 = "{wheel}"
python = "311"
platform = "any"
licence = "MIT"
files = "baseline/toyup.sha256"

[arms.up]
module = "baseline.up"
upstream = "toyup-1.0"
devices = ["cpu"]
"""

SPOILS = """
import pathlib
CALLS = []
def axpy(x, y, *, factor):
    CALLS.append(1)
    if len(CALLS) == 1:
        (tree,) = pathlib.Path({cache!r}).glob("toyup-*")
        {damage}
    return factor * x + y
"""


@pytest.mark.parametrize(
    "damage", ["(tree / 'toyup' / '__init__.py').write_text('0')", "__import__('shutil').rmtree(tree)"]
)
def test_upstream_files_that_change_during_a_run_make_it_noisy(toy, tmp_path, monkeypatch, damage):
    """An arm may edit them for the next generation of workers, and no hash of the task covers them."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("KDA_CACHE", str(cache))
    (cache / "wheels").mkdir(parents=True)
    wheel = cache / "wheels" / "toyup-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toyup/__init__.py", UPSTREAM)
        archive.writestr("toyup-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toyup\nVersion: 1.0\n")
    (toy.path / "baseline" / "toyup.sha256").write_text(f"{sha256(UPSTREAM).hexdigest()}  toyup/__init__.py\n")
    (toy.path / "baseline" / "up.py").write_text("from toyup import axpy\n")
    with (toy.path / "config.toml").open("a") as config:
        config.write(PINNED.format(wheel=sha256(wheel.read_bytes()).hexdigest()))
    source = SPOILS.format(cache=str(cache), damage=damage)
    record = bench(toy, source, measure=False, against=["up"])
    assert record.rows[0].verdict is Verdict.CORRECT
    assert record.noisy == ("upstream of up changed on disk during the run",)


LATE = """
import sys, torch
owed = []
def axpy(x, y, *, factor):
    owed.append((torch.empty_like(x), x, y, factor))
    return owed[-1][0]
def late(ask):
    def patched(*arguments):
        while owed:
            out, x, y, factor = owed.pop()
            torch.add(y, x, alpha=factor, out=out)
        return ask(*arguments)
    return patched
Channel = sys.modules["kda_judge.arms.protocol"].Channel
Channel.receive, Channel.send = late(Channel.receive), late(Channel.send)
Worker = sys.modules["kda_judge.arms.arm_worker"].Worker
for name in ("_opened", "_hand_back", "collect", "verify"):
    setattr(Worker, name, late(getattr(Worker, name)))
"""


def test_what_an_arm_makes_of_the_workers_classes_has_no_effect(toy):
    """It returns memory that it has not written, and would compute once its time has been taken."""
    assert bench(toy, LATE, measure=False).rows[0].verdict is Verdict.INCORRECT


LESS = (
    "import sys\nworker = sys.modules['kda_judge.arms.arm_worker']\ntimed = worker.Timed\n"
    "worker.Timed = lambda **facts: timed(**{{**facts, 'total_us': facts['total_us'] * {share}}})\n"
)


@pytest.mark.parametrize(("share", "verdict"), [(0.1, Verdict.INVALID), (0.7, Verdict.CORRECT)])
def test_a_claim_of_less_time_does_not_hide_a_loop(toy, share, verdict):
    """Where the loop's end is not known well enough to look at its last output, that is the arm's doing."""
    row = bench(toy, LESS.format(share=share) + SLOW.format("1e-3")).rows[0]
    assert row.verdict is verdict
    assert row.arms["eager"].replaced == 2
    if verdict is Verdict.INVALID:
        assert re.fullmatch(r"arm 'arm' claims less than half of the time that passed in [5-9] of 9 loops", row.reason)
        assert row.arms["arm"].replaced < 2
    else:
        assert row.arms["arm"].replaced == 2


@pytest.mark.parametrize(("longest_s", "compared"), [(1.0, 2), (0.0, 0)])
def test_a_judge_that_comes_too_late_is_not_held_against_the_arm(toy, longest_s, compared, monkeypatch):
    """Loops grow beyond its delay; where they may not, the record says that nothing was compared."""
    counts, sleep, ask = [], time.sleep, ArmProcess.ask
    monkeypatch.setattr(replaced_inputs, "REPLACED_LONGEST_S", longest_s)
    monkeypatch.setattr("kda_judge.judge.replaced_inputs.time.sleep", lambda seconds: sleep(seconds + 0.15))

    def noted(process, command, *rest, **named):
        if process.spec.name == "arm" and named.get("meanwhile"):  # the sampler's own loops may grow on a busy machine
            counts.append(named["count"])
        return ask(process, command, *rest, **named)

    monkeypatch.setattr(ArmProcess, "ask", noted)
    row = bench(toy, SLOW.format("1e-3")).rows[0]
    assert row.verdict is Verdict.CORRECT
    assert row.arms["arm"].replaced == compared
    assert (max(counts) > 128) == bool(compared)  # 64 calls of 1 ms are a loop


def _spied(original, compared, wrong=()):
    def compare(*given, **named):
        found = original(*given, **named)
        compared.append("late" if len(compared) in wrong else found.failure)
        return dataclasses.replace(found, broken="late") if compared[-1] == "late" else found

    return compare


def test_what_a_worker_hands_back_is_copied_by_address():
    source, target = torch.randn(3, 4), torch.zeros(3, 4)
    place = Place(offset=0, shape=(3, 4), stride=(4, 1), dtype="float32")
    memory = Memory("cpu")
    refused = (source.t(), source[:2], source.to("meta"), torch.nn.Parameter(source))
    assert not any(memory.copy(tensor, target.data_ptr(), place) for tensor in refused)
    assert not bool(target.any())
    assert memory.copy(source, target.data_ptr(), place)
    assert torch.equal(source, target)
    nothing = Place(offset=0, shape=(0, 4), stride=(4, 1), dtype="float32")
    assert memory.copy(source[:0], 0, nothing)


def test_workers_keep_outputs_of_so_many_bytes_and_the_newest():
    tensors = tuple(torch.empty(count) for count in (4, 1, 2))
    kept = [len(_newest(tensors, most)) for most in (0, 8, 12, 27, 28)]
    assert kept == [0, 1, 2, 2, 3]
    assert _newest(tensors, 12)[-1] is tensors[-1]


def test_what_idle_arms_do_is_measured(toy, monkeypatch):
    """Processor time as the kernel counts it: of one that spins in a thread, and is held, and of one that waits.

    With nobody to hold it, it would be a busy one.
    """
    spin = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
    (toy.path / "faulty" / "spins.py").write_text(spin + GOOD)
    modules = {"spins": "faulty.spins", "waits": "solution"}
    arms = {
        name: ArmProcess(ArmSpec(name=name, folder=str(toy.path), module=module, device="cpu"), 20, {})
        for name, module in modules.items()
    }
    notes = {name: ArmNotes() for name in (*arms, "asked")}
    assert processes(arms) == {}
    try:
        for arm in arms.values():
            arm.start()
            arm.hello()
        with watched("asked", arms, notes, None):
            time.sleep(0.5)
        held = notes["spins"].idle_cpu_s
        monkeypatch.setattr(idle_arms, "ROUNDS", 0)
        with watched("asked", arms, notes, None):
            time.sleep(2.0)  # on a busy machine the thread gets a small share of a processor
        monkeypatch.undo()
        with watched("spins", arms, notes, None):
            time.sleep(0.1)
        assert notes["spins"].fault is None
        with watched("spins", arms, notes, 10_000):
            pass
    finally:
        for arm in arms.values():
            arm.stop()
    assert held < 0.05
    assert notes["spins"].idle_s == pytest.approx(2.5, abs=0.3)
    assert notes["waits"].idle_s == pytest.approx(2.6, abs=0.3)
    assert busy("waits", notes["waits"]) is None
    fault = busy("spins", notes["spins"])
    assert re.fullmatch(r"arm 'spins' kept \d+% of a processor busy while others were timed", str(fault))
    assert busy("spins", ArmNotes(idle_s=0.04, idle_cpu_s=0.04)) is None
    assert str(notes["spins"].fault) == "the affinity of arm 'spins' was changed"


def test_a_run_whose_files_vanish_keeps_its_record(toy):
    record = bench(
        toy, "import shutil, pathlib\nshutil.rmtree(pathlib.Path(__file__).parents[1] / 'solution')\n" + GOOD
    )
    assert record.rows[0].verdict is Verdict.CORRECT
    assert "solution changed on disk during the run" in record.noisy


def test_an_honest_run_leaves_the_files_as_they_were(toy):
    stale = toy.path / "solution" / "__pycache__" / "old.pyc"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"compiled earlier")
    assert bench(toy, GOOD).noisy == ()
    assert not stale.exists()


@contextmanager
def hanging(toy, tmp_path):
    """A `kda bench` whose solution has been called, and does not return."""
    called = tmp_path / "called"
    (toy.path / "solution" / "__init__.py").write_text(
        "import pathlib, time\n"
        "def axpy(x, y, *, factor):\n"
        f"    pathlib.Path({str(called)!r}).touch()\n"
        "    time.sleep(99)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "kda_tools", *RUN],
        cwd=toy.path.parents[1],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=listen_to_interrupts,
    ) as process:
        try:
            assert until(called.exists, seconds=60)
            assert workers_of(toy)
            yield process
        finally:
            process.kill()


def test_ctrl_c_does_not_wait_for_a_hung_arm(toy, tmp_path):
    with hanging(toy, tmp_path) as process:
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_killed_judge(toy, tmp_path, by):
    with hanging(toy, tmp_path) as process:
        process.send_signal(by)
        process.wait(10)
        assert until(lambda: not workers_of(toy), seconds=1)


def test_a_broken_solution_exits_5_and_keeps_its_record(toy, tmp_path):
    (toy.path / "solution" / "__init__.py").write_text("raise ImportError('libfoo')\n")
    ran = kda(toy, *RUN, "--json", str(tmp_path / "r.json"))
    assert (ran.returncode, (tmp_path / "r.json").exists()) == (5, True)


def test_a_wrong_solution_without_the_hook_exits_1(toy):
    (toy.path / "solution" / "__init__.py").write_text("def axpy(x, y, *, factor):\n    return x + y\n")
    assert kda(toy, *RUN).returncode == 1


def test_a_json_path_that_cannot_be_written_is_refused_first(toy):
    ran = kda(toy, *RUN, "--json", "nowhere/r.json")
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False)


@pytest.mark.parametrize(
    "body",
    [
        "    raise RuntimeError('boom')",
        "    return factor * x.double() + y.double()",
        "    return ((factor * x.double() + y.double())[:-1],)",
        "    return (factor * x.bfloat16() + y.bfloat16(),)",
        "    out = factor * x.double() + y.double()\n    out[0, 0] = float('nan')\n    return (out,)",
    ],
    ids=["raises", "bare tensor", "wrong shape", "bfloat16", "nan"],
)
def test_a_bad_oracle_is_named(toy, body):
    (toy.path / "bench" / "reference.py").write_text(f"def axpy(x, y, *, factor):\n{body}\n\naxpy_ = squash = axpy\n")
    wrong = "def axpy(x, y, *, factor):\n    out = factor * x + y\n    out[0, 0] = 12345.0\n    return out\n"
    with pytest.raises(KdaError, match="reference"):
        bench(toy, wrong if "nan" in body else GOOD)


def test_no_seeds_means_nothing_was_checked(toy):
    config = toy.path / "config.toml"
    config.write_text(config.read_text().replace("generations = 2", "generations = 2\nseeds = []"))
    with pytest.raises(KdaError, match="seeds"):
        bench(toy, "def axpy(x, y, *, factor):\n    return x\n", measure=False)


def test_shrinking_does_not_hide_a_broken_row(toy):
    rows = toy.path / "bench" / "workloads.toml"
    rows.write_text(rows.read_text().replace("shape = [64, 16], dtype", "shape = [72, 16], dtype", 1))
    with pytest.raises(KdaError, match=r"workloads.toml.*72"):
        bench(toy, GOOD)


def test_a_dtype_without_a_tolerance_is_named(toy):
    rows = toy.path / "bench" / "workloads.toml"
    rows.write_text(rows.read_text().replace("float32", "float16"))
    with pytest.raises(KdaError, match=r"tolerance.float16"):
        bench(toy, GOOD)


def test_an_in_place_op_that_returns_something_is_refused(toy):
    config = toy.path / "config.toml"
    config.write_text(config.read_text().replace('returns = "none"', 'returns = "outputs"'))
    with pytest.raises(KdaError, match="returns = 'none'"):
        bench(toy, GOOD)


def test_a_gpu_beside_a_cpu_torch(toy, monkeypatch):
    from core.judge.tests.records_factory import gpu_reading
    from kda_judge.evidence import gpu_state

    if torch.cuda.is_available():
        pytest.skip("torch has CUDA")
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading())
    with pytest.raises(KdaError, match=r"torch .* cannot use it"):
        open_session(Request(task=toy))


def test_an_interrupt_lets_go_whom_it_finds_held(monkeypatch):
    """Else the judge would wait for workers that cannot end."""
    sent = []
    monkeypatch.setattr(idle_arms, "processes", lambda _arms, _look: {"asked": [1, 2], "other": [3, 4, 5]})
    monkeypatch.setattr(idle_arms.os, "kill", lambda process, number: sent.append((process, number)))

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(idle_arms, "stopped", interrupted)
    with pytest.raises(KeyboardInterrupt), idle_arms.alone("asked", {}):
        pass
    stop, go_on = idle_arms.signal.SIGSTOP, idle_arms.signal.SIGCONT
    assert sorted(sent) == sorted([(4, stop), (5, stop), (4, go_on), (5, go_on)])


@pytest.mark.parametrize(("size", "changed"), [(640, 10), (32, 32)])
def test_a_stretch_of_an_input_is_drawn_again_or_all_of_a_small_one(monkeypatch, size, changed):
    monkeypatch.setattr(checker, "ask_oracle", lambda *_: ())
    spec = TensorSpec(shape=(size,), dtype="float32")
    case = SimpleNamespace(op=None, row=Workload(id="r", op="axpy", inputs={"x": spec}))
    judged = checker.Checker(SimpleNamespace(device="cpu", reference=None, spent=Spent()))
    old = make(case.row, Family.NORMAL, 7, "cpu")
    new, _ = judged.redraw(case, old)
    assert int((new["x"] != old["x"]).sum()) == changed
