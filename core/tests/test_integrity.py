"""Ways around the judge, and ways to lose a run, that were open once: each must stay closed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kda_core
from core.tests.conftest import listen_to_interrupts
from kda_core import verdict
from kda_core.bench import Request, frozen_rows, open_session, run
from kda_core.errors import KdaError
from kda_core.notes import ArmNotes, RowNotes
from kda_core.records import Settings, Verdict
from kda_core.tasks import Task

ENV = {**os.environ, "PYTHONPATH": str(Path(kda_core.__file__).parents[1])}
RUN = ("bench", "axpy", "--device", "cpu", "--rows", "out*", "--generations", "1")


def bench(task, source, rows="out", measure=True):
    (task.path / "faulty" / "arm.py").write_text(source)
    config = task.path / "config.toml"
    config.write_text(config.read_text() + '\n[arms.arm]\nmodule = "faulty.arm"\ndevices = ["cpu"]\n')
    fresh = Task(path=task.path, package=task.package)
    session = open_session(Request(task=fresh, rows=[f"{rows}*"], subject="arm", device="cpu", generations=1))
    return run(session, frozen_rows(session), measure=measure, progress=lambda *_: None)


def kda(task, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kda_core", *arguments],
        cwd=task.path.parents[1],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )


GOOD = "def axpy(x, y, *, factor):\n    return factor * x + y\n"


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
        Verdict.UNVERIFIED,
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


def test_ctrl_c_does_not_wait_for_a_hung_arm(toy):
    (toy.path / "solution" / "__init__.py").write_text("import time\ndef axpy(x, y, *, factor):\n    time.sleep(99)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kda_core", *RUN],
        cwd=toy.path.parents[1],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=listen_to_interrupts,
    )
    time.sleep(8)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert time.monotonic() - begin < 5


def test_no_worker_outlives_a_killed_judge(toy):
    (toy.path / "solution" / "__init__.py").write_text("import time\ndef axpy(x, y, *, factor):\n    time.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kda_core", *RUN],
        cwd=toy.path.parents[1],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(8)
    process.terminate()
    process.wait(10)
    time.sleep(1)
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if "kda_core.worker" in line and toy.package in line]


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
    from core.tests.records_factory import gpu_state
    from kda_core import gpu

    if torch.cuda.is_available():
        pytest.skip("torch has CUDA")
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "read_state", lambda *_: gpu_state())
    with pytest.raises(KdaError, match=r"torch .* cannot use it"):
        open_session(Request(task=toy))
