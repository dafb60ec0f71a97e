"""The real judge with real worker processes, on the CPU: what a run keeps, loses and says. See adversaries/, too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kda_core
from core.tests.conftest import listen_to_interrupts
from core.tests.processes import until, workers_of
from kda_core.bench import Request, frozen_rows, open_session, run
from kda_core.records import Metric, Verdict
from kda_core.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def bench(task: Task, arm: str, rows: str, progress=lambda row, phase: None, generations=2):
    """One run of `arm` on the rows that match."""
    if arm != "solution":
        config = task.path / "config.toml"
        table = f'\n[arms.{arm}]\nmodule = "faulty.{arm}"\ndevices = ["cpu"]\n'
        config.write_text(config.read_text() + table)
    fresh = Task(path=task.path, package=task.package)
    session = open_session(Request(task=fresh, rows=[f"{rows}*"], subject=arm, device="cpu", generations=generations))
    return run(session, frozen_rows(session), measure=True, progress=progress)


def test_a_run_without_a_gpu_keeps_no_time(toy):
    record = bench(toy, "solution", "*")
    assert {row.id for row in record.rows} == {"out-64x16", "inplace-64x16"}
    assert all(not arm.samples and not arm.summary for row in record.rows for arm in row.arms.values())
    assert record.headline is None
    checks = [row.arms["solution"].correctness.checks for row in record.rows]
    # 3 seeds x 3 families, one more per later generation, every family in the audit, one per timed sample.
    assert checks == [9 + 1 + 3 + 2, 9 + 1 + 3 + 2]


def test_a_crash_costs_one_row_and_the_next_one_gets_a_new_worker(toy):
    faulty = toy.path / "faulty" / "segfaults.py"
    faulty.write_text(faulty.read_text() + "\n\nfrom ..baseline import axpy_\n")
    record = bench(toy, "segfaults", "*")
    out, inplace = sorted(record.rows, key=lambda row: row.id, reverse=True)
    assert (out.verdict, inplace.verdict) == (Verdict.ERROR, Verdict.UNVERIFIED)
    assert inplace.arms["segfaults"].restarts == 1
    assert inplace.arms["segfaults"].correctness.passed


@pytest.mark.parametrize("held", [("float32",), ("bfloat16",)])
def test_an_error_beyond_twice_the_opponents_is_incorrect(toy, held):
    """On a CPU where the output's dtype is one of those that `cpu.yardstick` names."""
    config = toy.path / "config.toml"
    every = 'yardstick = ["float32", "bfloat16"]'
    assert every in config.read_text()
    config.write_text(config.read_text().replace(every, f"yardstick = {list(held)}"))
    (toy.path / "faulty" / "coarse.py").write_text(
        "def axpy(x, y, *, factor):\n    return factor * x + y + 4e-6 * (1 + 0 * x)\n"
    )
    record = bench(toy, "coarse", "out")
    if "float32" in held:
        assert record.rows[0].verdict is Verdict.INCORRECT
        assert "more than twice the baseline's" in record.rows[0].reason
    else:
        assert record.rows[0].verdict is Verdict.UNVERIFIED


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
    assert workers_of(toy.package) == []


def test_ctrl_c_on_the_command_line_exits_130(checkout):
    path = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    path.write_text(path.read_text() + "\n\nimport time\n\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kda_core", "bench", "axpy", "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(kda_core.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        preexec_fn=listen_to_interrupts,
    )
    assert until(lambda: bool(workers_of("toys.k90_axpy")), seconds=60)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert workers_of("toys.k90_axpy") == []


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
