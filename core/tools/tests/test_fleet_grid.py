"""`kda fleet` as a user starts it: a real grid on a real Ray with two workers on the CPU, one of which is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from core.tools.tests.conftest import Kda
from kda_judge.arms.process_tree import trees
from kda_judge.contract.errors import ExitCode, KdaError, MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_judge.evidence import gpu_state
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_tools.fleet import ray_pool
from kda_tools.fleet.checkout import SOURCES as CHECKOUT_SOURCES
from kda_tools.fleet.open_run import RunOptions
from kda_tools.fleet.pieces import Job
from kda_tools.fleet.run_fleet import run
from kda_tools.fleet.run_folder import RunFolder

pytest.importorskip("ray")
GRID = """\
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload


def grid():
    x = TensorSpec(shape=(4, 8), dtype='float32')
    yield Workload(id='extra', op='axpy', inputs={'x': x, 'y': x}, scalars={'factor': 2})


thin = list
"""
PIECE = b"kda_tools.fleet.piece_process"
SOURCES = import_path()
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(900)  # for busy machines


def fleet(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kda_tools", "fleet", "run", *arguments]
    env = {**os.environ, "PYTHONPATH": SOURCES, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_event(running: subprocess.Popen[str], events: Path, what: str) -> None:
    while not events.is_file() or f'"{what}"' not in events.read_text():
        assert running.poll() is None, f"it ended before anything was {what}"
        time.sleep(0.05)


def kill_a_piece(driver: int) -> None:
    """Kill a process that is at a piece: it has started others, and one that waits for its question has not."""
    while True:
        for pid in trees([driver])[driver]:
            with suppress(OSError):  # it may have ended
                if PIECE in Path(f"/proc/{pid}/cmdline").read_bytes() and len(trees([pid])[pid]) > 1:
                    os.kill(pid, signal.SIGKILL)
                    return
        time.sleep(0.05)


def test_a_grid_on_two_workers_of_which_one_is_killed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "toys" / "k90_axpy" / "bench" / "grid.py").write_text(GRID)
    out = checkout / "run"
    running = fleet(checkout, "validate", "axpy", "--out", str(out))
    try:
        await_event(running, out / "events.jsonl", "started")
        kill_a_piece(running.pid)
        said, err = running.communicate()
    finally:
        running.kill()
    assert running.returncode == ExitCode.OK, err
    assert "axpy: 3 of 3 rows agree with the oracle, on the CPU" in said
    assert "1 attempt lost" in said
    with RunFolder(out).open() as folder:
        records = [RunRecord.model_validate_json(one.line) for one in folder.results]
        assert sorted(one.attempt for one in folder.results) == [1, 2]
        (lost,) = [event for event in folder.events if event.event == "lost"]
        assert lost.why is not None
        assert "the process ended with -9" in lost.why
        files = folder.plan.files if folder.plan else {}
    assert sorted(row.id for record in records for row in record.rows) == ["extra", "inplace-64x16", "out-64x16"]
    assert {row.verdict for record in records for row in record.rows} == {Verdict.CORRECT}
    assert sorted(record.attempt or 0 for record in records) == [1, 2]
    assert all(record.node and record.settings.rows == () for record in records)
    assert list(files) == ["axpy"]
    # What is wrong with a folder is told before a Ray is started.
    monkeypatch.setattr(ray_pool, "cluster", lambda *_: pytest.fail("started"))
    with pytest.raises(UsageError, match="expected a new folder, got that of a run; go on by --resume"):
        run(RunOptions(job=Job.VALIDATE, out=out))
    with pytest.raises(UsageError, match="this is a run of validate, got bench"):
        run(RunOptions(job=Job.BENCH, resume=out))
    edited = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    edited.write_text(edited.read_text() + "\n")
    with pytest.raises(UsageError, match="the files of axpy are not those that it was begun with"):
        run(RunOptions(job=Job.VALIDATE, resume=out))


def test_sigterm_keeps_what_came_and_resume_does_the_rest(checkout: Path) -> None:
    out = checkout / "run"
    running = fleet(checkout, "bench", "axpy", "--parts", "2", "--out", str(out), "--gpus", "1")
    try:
        await_event(running, out / "events.jsonl", "finished")
        running.send_signal(signal.SIGTERM)
        said, err = running.communicate()
    finally:
        running.kill()
    assert running.returncode == ExitCode.INTERRUPTED, err
    assert f"--resume {out}" in said
    with RunFolder(out).open() as folder:
        kept = [one.piece for one in folder.results]
    assert kept
    resumed = fleet(checkout, "bench", "--resume", str(out), "--gpus", "1")
    said, err = resumed.communicate()
    assert resumed.returncode == ExitCode.OK, err
    assert "2 of 2 pieces" in said
    with RunFolder(out).open() as folder:
        assert [one.piece for one in folder.results][: len(kept)] == kept
        rows = [row.id for one in folder.results for row in RunRecord.model_validate_json(one.line).rows]
    assert sorted(rows) == ["inplace-64x16", "out-64x16"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_a_cluster_that_is_reached_by_rays_client_gets_the_commit(checkout: Path) -> None:
    """The workers have no checkout of their own: the archive of the commit is all that they run."""
    from ray.cluster_utils import Cluster

    for folder in CHECKOUT_SOURCES:
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".gitignore").write_text("__pycache__/\n")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "toys")):
        subprocess.run(["git", "-c", "user.name=Tests", "-c", "user.email=tests@example.org", *command], check=True)
    port = free_port()
    head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        running = fleet(checkout, "validate", "axpy", "--address", f"ray://127.0.0.1:{port}", "--out", "../run")
        said, err = running.communicate()
    finally:
        running.kill()
        cluster.shutdown()
    assert running.returncode == ExitCode.OK, err
    assert "axpy: 2 of 2 rows agree with the oracle, on the CPU" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "--quick", "--record"), "--record: a task's ledger holds whole runs, and --quick is a first look"),
        (("validate", "--quick"), "--quick: expected with bench, got validate"),
        (("model", "--rows", "a*"), "--rows: expected with bench, validate or tune, got model"),
        (("bench", "--resume", "."), "--resume .: expected the folder of a run, found no events.jsonl in it"),
        (("bench", "--resume", ".", "--parts", "7"), "--resume: the run knows names, rows, parts"),
        (
            ("bench", "--out", "/proc/x"),
            "--out /proc/x: expected a folder, or where one can be made, got: No such file",
        ),
        (("bench", "--out", "pyproject.toml"), "--out pyproject.toml: expected a folder, or where one can be made"),
        (
            ("bench", "--missing", "8", "--parts", "2"),
            "--missing: expected with bench and without --parts, got bench, --parts 2",
        ),
        (("validate", "--missing", "8"), "--missing: expected with bench and without --parts, got validate, --parts 1"),
        (("bench", "axyp"), "unknown task 'axyp'; nearest: axpy"),
    ],
)
def test_what_makes_no_sense_is_told_before_ray_is_started(
    toy: Task, monkeypatch: pytest.MonkeyPatch, kda: Kda, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(ray_pool, "cluster", lambda *_: pytest.fail("started"))
    Path("pyproject.toml").touch()
    code, _, err = kda("fleet", "run", *arguments)
    assert code == ExitCode.USAGE
    assert f"kda: {words}" in err


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (RunOptions(job=Job.VALIDATE, names=("axpy",), rows=("nomatch",)), "--rows 'nomatch': no such row"),
        (RunOptions(job=Job.BENCH, names=("axpy",), rows=("nomatch",)), "--rows 'nomatch': no such row"),
        (RunOptions(job=Job.TUNE, names=("axpy",)), "tune: expected a GPU, there is none"),
        (RunOptions(job=Job.BENCH, names=("axpy",), record=True), "--record: expected a GPU, there is none"),
        (RunOptions(job=Job.BENCH, names=("axpy",), missing=8), "--missing: expected a GPU on this machine"),
    ],
)
def test_rows_and_gpus_that_are_not_there_are_told_before_ray_is_started(
    toy: Task, monkeypatch: pytest.MonkeyPatch, wish: RunOptions, words: str
) -> None:
    monkeypatch.setattr(ray_pool, "cluster", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    with pytest.raises(KdaError, match=words):
        run(wish)


def test_a_run_that_is_refused_leaves_no_folder(toy: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise MissingRequirement("no ray")

    monkeypatch.setattr(ray_pool, "cluster", none)
    with pytest.raises(MissingRequirement, match="no ray"):
        run(RunOptions(job=Job.BENCH, names=("axpy",), out=Path("run")))
    assert not Path("run").exists()


def test_events_are_lines_that_other_tools_can_read(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open() as folder:
        folder.note("joined", worker="n/0", node="n", gpu="GPU-0")
    (line,) = folder.events_file.read_text().splitlines()
    told = json.loads(line)
    assert (told["event"], told["worker"], told["gpu"]) == ("joined", "n/0", "GPU-0")
