"""The real judge with real worker processes, on the CPU: every failing arm is named as what it is."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kda_core
from core.tests.conftest import listen_to_interrupts
from kda_core.bench import Request, frozen_rows, open_session, run
from kda_core.records import Metric, Verdict
from kda_core.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# arm, row, verdict, words of the reason
FAULTS = [
    ("raises", "out", Verdict.ERROR, r"'raises' raised RuntimeError: no such kernel image \(raises.py"),
    ("raises_on_import", "out", Verdict.ERROR, "ImportError: libmissing.so"),
    ("lacks_the_op", "out", Verdict.ERROR, "has no callable 'axpy'"),
    ("segfaults", "out", Verdict.ERROR, "was killed by SIGSEGV during 'verify'"),
    ("exits", "out", Verdict.ERROR, "exited with code 0 during 'verify'\n    | all rows FASTER"),
    ("hangs", "out", Verdict.TIMEOUT, "no answer within 2 s to 'verify'"),
    ("writes_to_the_channel", "out", Verdict.ERROR, "wrote garbage on the judge's channel"),
    ("returns_none", "out", Verdict.INCORRECT, "expected 1 tensor, got None"),
    ("returns_two", "out", Verdict.INCORRECT, "expected 1 tensor, got tuple of 2"),
    ("returns_a_number", "out", Verdict.INCORRECT, "expected 1 tensor, got float"),
    ("wrong_shape", "out", Verdict.INCORRECT, r"output 'out': expected shape \[8, 16\], got \[16, 8\]"),
    ("wrong_dtype", "out", Verdict.INCORRECT, "expected dtype float32, got float64"),
    ("wrong_device", "out", Verdict.INCORRECT, "expected device cpu, got meta"),
    ("wrong_stride", "out", Verdict.INCORRECT, r"expected stride \[16, 1\], got \[1, 8\]"),
    ("subclass", "out", Verdict.INCORRECT, "expected type Tensor, got Lazy"),
    ("namesake", "out", Verdict.INCORRECT, r"expected type Tensor, got Tensor \(subclass\)"),
    ("one_buffer", "out", Verdict.INCORRECT, "lies in the memory of another output that is still in use"),
    ("nan", "out", Verdict.INCORRECT, r"worst at \[3, 5\].*got nan; 1 not finite"),
    ("unwritten", "out", Verdict.INCORRECT, "48 of 128 elements outside tolerance"),
    ("one_wrong_element", "out", Verdict.INCORRECT, r"1 of 128 elements outside tolerance; worst at \[7, 15\]"),
    ("alias", "out", Verdict.INCORRECT, "'out' is an alias of an input"),
    ("changes_input", "out", Verdict.INCORRECT, "input 'y' was changed"),
    ("writes_gaps", "out", Verdict.INCORRECT, "memory between the elements of the strided 'y' was changed"),
    ("remembers", "out", Verdict.INCORRECT, "is the previous call's result: it was remembered, not computed"),
    ("out_of_bounds", "out", Verdict.INCORRECT, "wrote outside its tensors"),
    ("noop_in_place", "inplace", Verdict.INCORRECT, "output 'x'"),
    ("returns_in_place", "inplace", Verdict.INCORRECT, "expected None"),
    ("prints", "out", Verdict.UNVERIFIED, "correct on the CPU"),
    ("solution", "*", Verdict.UNVERIFIED, "correct on the CPU"),
]


def bench(task: Task, arm: str, rows: str, progress=lambda row, phase: None, generations=2):
    """One run of `arm` on the rows that match."""
    if arm != "solution":
        config = task.path / "config.toml"
        table = f'\n[arms.{arm}]\nmodule = "faulty.{arm}"\ndevices = ["cpu"]\n'
        config.write_text(config.read_text() + table)
    if arm == "hangs":
        config.write_text(config.read_text().replace("timeout_s = 20", "timeout_s = 2"))
    fresh = Task(path=task.path, package=task.package)
    session = open_session(Request(task=fresh, rows=[f"{rows}*"], subject=arm, device="cpu", generations=generations))
    return run(session, frozen_rows(session), measure=True, progress=progress)


@pytest.mark.parametrize(("arm", "row", "verdict", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_every_arm_is_named_as_what_it_is(toy, arm, row, verdict, words):
    record = bench(toy, arm, row, generations=1)
    assert record.rows
    for result in record.rows:
        assert result.verdict is verdict, result.reason
        assert re.search(words, result.reason, re.DOTALL), result.reason


def test_a_run_without_a_gpu_keeps_no_time(toy):
    record = bench(toy, "solution", "*")
    assert {row.id for row in record.rows} == {"out-64x16", "inplace-64x16"}
    assert all(not arm.samples and not arm.summary for row in record.rows for arm in row.arms.values())
    assert record.headline is None
    checks = [row.arms["solution"].correctness.checks for row in record.rows]
    # 3 seeds x 3 families, one more per later generation and for the audit, one per timed sample.
    assert checks == [9 + 1 + 1 + 2, 9 + 1 + 1 + 2]


def test_a_crash_costs_one_row_and_the_next_one_gets_a_new_worker(toy):
    faulty = toy.path / "faulty" / "segfaults.py"
    faulty.write_text(faulty.read_text() + "\n\nfrom ..baseline import axpy_\n")
    record = bench(toy, "segfaults", "*")
    out, inplace = sorted(record.rows, key=lambda row: row.id, reverse=True)
    assert (out.verdict, inplace.verdict) == (Verdict.ERROR, Verdict.UNVERIFIED)
    assert inplace.arms["segfaults"].restarts == 1
    assert inplace.arms["segfaults"].correctness.passed


def test_an_error_beyond_twice_the_opponents_is_incorrect(toy):
    (toy.path / "faulty" / "coarse.py").write_text(
        "def axpy(x, y, *, factor):\n    return factor * x + y + 4e-6 * (1 + 0 * x)\n"
    )
    record = bench(toy, "coarse", "out")
    assert record.rows[0].verdict is Verdict.INCORRECT
    assert "more than twice the baseline's" in record.rows[0].reason


def test_interrupt_ends_the_workers_and_keeps_what_was_measured(toy):
    started = []

    def interrupt(row, phase):
        started.append((row, phase))
        if phase == "audit" and row.startswith("inplace"):
            raise KeyboardInterrupt

    record = bench(toy, "solution", "*", interrupt)
    assert record.partial
    assert {row.id: row.verdict for row in record.rows} == {
        "out-64x16": Verdict.UNVERIFIED,
        "inplace-64x16": Verdict.INVALID,
    }
    assert "interrupted" in record.rows[1].reason
    assert _workers_of(toy.package) == []


def test_ctrl_c_on_the_command_line_exits_130(checkout):
    path = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    path.write_text(path.read_text() + "\n\nimport time\n\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kda_core", "bench", "axpy", "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(kda_core.__file__).parents[1])},
        preexec_fn=listen_to_interrupts,
    )
    deadline = time.monotonic() + 60
    while not _workers_of("toys.k90_axpy") and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert _workers_of("toys.k90_axpy") == []


def test_a_faulty_opponent_is_named_and_not_the_subject(toy):
    path = toy.path / "baseline" / "__init__.py"
    path.write_text(path.read_text().replace("factor * x + y", "factor * x - y"))
    record = bench(toy, "solution", "out")
    assert record.rows[0].verdict is Verdict.INCORRECT
    assert record.rows[0].reason.startswith("eager: output 'out'")


def test_the_judge_does_not_import_an_arm(toy):
    before = set(sys.modules)
    bench(toy, "solution", "out")
    new = {name for name in set(sys.modules) - before if name.startswith(toy.package)}
    assert not any("solution" in name or "baseline" in name for name in new), new


def test_metrics_of_the_protocol_were_all_asked_for(toy, monkeypatch):
    """On a CPU the timed commands run too, although nothing of them is kept."""
    from kda_core import verdict

    seen = []
    original = verdict._arm
    monkeypatch.setattr(verdict, "_arm", lambda arm, *rest: seen.append(dict(arm.samples)) or original(arm, *rest))
    bench(toy, "solution", "out")
    assert all(set(samples) == {Metric.WALL, Metric.LATENCY} for samples in seen)
    assert all(len(generations) == 2 for samples in seen for generations in samples.values())


def _workers_of(package: str) -> list[str]:
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "kda_core.worker" in line and package in line]
