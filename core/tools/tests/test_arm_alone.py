"""One arm alone in its process, on the CPU: the toy task and k01 in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

from core.judge.tests.processes import is_running
from kda_judge.arms.arm_import import callable_of
from kda_judge.arms.protocol import ArmSpec
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, find_task
from kda_judge.contract.workloads import Workload
from kda_judge.session import Request, Session, arm_spec, frozen_rows, open_session
from kda_tools.lab.inspect import arm_alone, cuda_tools

REPOSITORY = Path(__file__).parents[3]


def open_cpu(task: Task, subject: str = "solution", rows: tuple[str, ...] = ()) -> tuple[Session, tuple[Workload, ...]]:
    session = open_session(Request(task=task, rows=list(rows), subject=subject, against=["eager"], device="cpu"))
    return session, frozen_rows(session)


def job_of(session: Session, rows: tuple[Workload, ...], order: tuple[int, ...] = (0, 0, 1)) -> arm_alone.Job:
    arm = arm_spec(session, session.settings.subject)
    return arm_alone.Job(arm=arm, visits=cuda_tools.visits(session, rows), order=order, draw_on="cpu")


def test_toy_rows_are_called_to_the_end(toy):
    session, rows = open_cpu(toy)
    ran = cuda_tools.run_below([], session, job_of(session, rows), {})
    assert (ran.code, ran.output, ran.done) == (0, "", ("out-64x16", "inplace-64x16"))


def test_k01_runs_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(REPOSITORY))
    session, rows = open_cpu(find_task("norm_infer"), rows=("zimage-rms-4096x128", "helios-*"))
    ran = cuda_tools.run_below([], session, job_of(session, rows), {})
    assert ran.code == 0, ran.output
    assert ran.done == ("helios-ln-8640x5120", "zimage-rms-4096x128")


def test_a_failing_arm_ends_the_process_and_is_not_done(toy):
    (toy.path / "solution" / "__init__.py").write_text(
        "def axpy(x, y, *, factor):\n    return x\n\n\ndef axpy_(*_, **__):\n    raise ValueError('no such factor')\n"
    )
    session, rows = open_cpu(toy)
    ran = cuda_tools.run_below([], session, job_of(session, rows), {})
    assert ran.code == 1
    assert ran.done == ("out-64x16",)
    assert "ValueError: no such factor" in ran.tail


def test_each_call_works_on_the_set_that_the_order_names(toy, monkeypatch, tmp_path):
    session, rows = open_cpu(toy, rows=("out-*",))
    seen = []

    class Arm:
        @staticmethod
        def axpy(x, y, *, factor):
            seen.append((x.data_ptr(), y.stride(), factor, float(x.sum())))

    monkeypatch.setattr(arm_alone, "import_arm", lambda _: Arm)
    arm_alone.run(job_of(session, rows, (0, 0, 1)), tmp_path / "done")
    assert [factor for _, _, factor, _ in seen] == [3, 3, 3]
    assert {stride for _, stride, _, _ in seen} == {(48, 1)}
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[2][0], "the second set lies in other memory"
    assert seen[0][3] != seen[2][3], "and holds other values"


def test_every_tensor_has_an_allocation_of_its_own(toy, monkeypatch, tmp_path):
    session, rows = open_cpu(toy, rows=("out-*",))
    sizes = []

    class Arm:
        @staticmethod
        def axpy(x, y, *, factor):
            sizes.extend(tensor.untyped_storage().nbytes() for tensor in (x, y))

    monkeypatch.setattr(arm_alone, "import_arm", lambda _: Arm)
    arm_alone.run(job_of(session, rows, (0,)), tmp_path / "done")
    assert torch.is_grad_enabled()  # as before
    (row,) = rows
    assert sizes == [4 * row.inputs["x"].span, 4 * row.inputs["y"].span]


def test_a_broadcast_input_is_filled(toy):
    spec = Workload.model_validate(
        {"id": "r", "op": "axpy", "inputs": {"x": {"shape": (4, 3), "stride": (0, 1), "dtype": "float32"}}}
    ).inputs["x"]
    value = torch.arange(3.0).expand(4, 3)
    placed = arm_alone.with_strides(value, spec, "cpu")
    assert placed.stride() == (0, 1)
    assert torch.equal(placed, value)


def test_an_arm_without_the_op_is_named(tmp_path):
    spec = ArmSpec(name="solution", folder="", module="json", device="cpu")
    with pytest.raises(AttributeError, match=r"arm 'solution' \(json\) has no callable 'axpy'"):
        callable_of(sys.modules["json"], spec, "axpy")


def test_tool_is_found_on_path_before_the_usual_folders(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "nsight" / "2025.3"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "ncu").write_text("#!/bin/sh\n")
        (folder / "ncu").chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cuda_tools, "FOLDERS", (f"{tmp_path}/nsight/*",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_tools.find("ncu", "") == second / "ncu"
    monkeypatch.setenv("PATH", str(first))
    assert cuda_tools.find("ncu", "") == first / "ncu"


def test_missing_tool_says_where_it_looked_and_what_helps(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(cuda_tools, "FOLDERS", (str(tmp_path / "none"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRequirement, match=r"ncu: not found on PATH nor in .*/cuda/bin, .*/none\. Install it"):
        cuda_tools.find("ncu", "Install it")


def test_a_process_that_hangs_is_ended_with_what_left_its_group(tmp_path):
    """As ninja's compilers do."""
    pids = tmp_path / "pids"
    script = (
        "import subprocess, time\nfrom kda_tools.lab.inspect.arm_alone import end_with_starter\nend_with_starter()\n"
        "made = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(made.pid))\ntime.sleep(600)"
    )
    environment = {"PYTHONPATH": import_path(), arm_alone.STARTER: str(os.getpid())}
    with pytest.raises(MissingRequirement, match="no end after 8 s"):
        cuda_tools.run_tool([sys.executable, "-c", script], environment, timeout_s=8)
    assert not is_running(int(pids.read_text()))


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path):
    mark = tmp_path / "survived"
    script = f"(sleep 2; touch {mark}) & sleep 60"
    with pytest.raises(MissingRequirement, match="sh: no end after 0 s"):
        cuda_tools.run_tool(["sh", "-c", script], {}, timeout_s=0.3)
    with pytest.raises(MissingRequirement, match="cannot be started"):
        cuda_tools.run_tool([str(tmp_path / "absent")], {})
    cuda_tools.run_tool(["sleep", "2.5"], {})
    assert not mark.exists()
