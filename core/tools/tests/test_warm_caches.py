"""`kda warm`: every arm calls every row, and who fails is named. On the CPU: the toy task."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from core.judge.tests.processes import is_running, until
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.evidence import gpu_state
from kda_judge.session import Request, frozen_rows, open_session
from kda_tools.lab import warm_caches
from kda_tools.lab.inspect.cuda_tools import Ran


@pytest.fixture
def filled(toy, monkeypatch):
    """How many processes fail, what is shown, and the rows whose streams would be compiled."""
    streamed = []
    monkeypatch.setattr(warm_caches, "run_tool", lambda words, *_: streamed.append(words[3:]) or Ran(0, "", ()))
    monkeypatch.setattr(warm_caches, "ROWS_EACH", 1)

    def run(show=None):
        shown = []
        session = open_session(Request(task=toy, against=["eager"], device="cpu"))
        return warm_caches.fill([session], 2, show or shown.append), shown, streamed

    return run


def test_every_arm_that_compiles_calls_every_row(toy, filled):
    failed, shown, streamed = filled()
    ids = [row.id for row in toy.workloads]
    assert failed == 0
    expected = ["axpy, limit", *(f"axpy, solution: {one} and 0 more" for one in ids)]
    assert sorted(line.partition("] ")[2] for line in shown) == sorted(expected)
    assert streamed == [["axpy", *ids]]


@pytest.mark.parametrize(
    ("count", "chosen", "seen"),
    [(0, None, [None]), (3, None, ["0", "1", "2"]), (2, "5,GPU-ab", ["5", "GPU-ab"]), (1, "3,9", ["3"])],
)
def test_processes_are_spread_over_the_visible_gpus(toy, monkeypatch, count, chosen, seen):
    """With one GPU for all, sixty processes waited 45 s for a context."""
    monkeypatch.delenv(warm_caches.VISIBLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(warm_caches.VISIBLE, chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    given = []
    monkeypatch.setattr(warm_caches, "run_tool", lambda *args: given.append(args[1]) or Ran(0, "", ()))
    monkeypatch.setattr(warm_caches, "run_below", lambda *args: given.append(args[3]) or Ran(0, "", ()))
    monkeypatch.setattr(warm_caches, "ROWS_EACH", 1)
    session = open_session(Request(task=toy, against=["eager"], device="cpu"))
    warm_caches.fill([session] * 3, 1, lambda _: None)
    assert [one.get(warm_caches.VISIBLE) for one in given] == (seen * len(given))[: len(given)]


def test_an_arm_that_fails_is_named_and_the_others_go_on(toy, filled):
    (toy.path / "solution" / "__init__.py").write_text("raise ImportError('no libfoo')\n")
    failed, shown, _ = filled()
    assert failed == len(toy.workloads)
    wrong = [line for line in shown if "exit code" in line]
    assert len(wrong) == failed
    assert all("axpy, solution: " in line and "ImportError: no libfoo" in line for line in wrong)


@pytest.fixture
def hanging(toy):
    """The file with the ids of the processes whose arm hangs, and of those that these started, as a compiler does."""
    pids = toy.path / "pids"
    hangs = (
        "import os, subprocess, time\n"
        "made = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n{{made.pid}}\\n')\ntime.sleep(600)\n"
    )
    (toy.path / "solution" / "__init__.py").write_text(hangs)
    return pids


def at_work(hanging):
    """Whether an arm hangs."""
    return hanging.exists() and hanging.read_text().endswith("\n")


def left(hanging):
    """The processes that run on."""
    return [int(pid) for pid in hanging.read_text().split() if is_running(int(pid))]


def test_a_process_that_hangs_fails_after_a_while(toy, filled, hanging, monkeypatch):
    monkeypatch.setattr(warm_caches, "JOB_S", 1.0)
    failed, shown, _ = filled()
    assert failed == len(toy.workloads)
    assert sum("no end after 1 s" in line for line in shown) == failed


def test_an_interrupt_drops_what_waits_and_ends_what_runs(filled, hanging):
    def interrupt(_):
        assert until(lambda: at_work(hanging), seconds=60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filled(interrupt)
    assert not left(hanging)


def test_more_interrupts_change_nothing(filled, hanging, monkeypatch):
    """While it ends what runs, a process gets `timeout`'s second SIGINT, or an impatient user's."""
    wait, calls = warm_caches.wait, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) <= 2:
            raise KeyboardInterrupt
        return wait(*arguments)

    def interrupt(_):
        assert until(lambda: at_work(hanging), seconds=60)
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_caches, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(interrupt)
    assert len(calls) > 2
    assert not left(hanging)


def test_processes_end_with_who_started_them(toy, hanging):
    script = (
        "from kda_judge.contract.tasks import find_task\nfrom kda_judge.session import Request, open_session\n"
        "from kda_tools.lab.warm_caches import fill\n"
        "fill([open_session(Request(task=find_task('axpy'), device='cpu'))], 2, print)"
    )
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": import_path()}) as process:
        assert until(lambda: at_work(hanging), seconds=60)
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not left(hanging))


def test_without_a_gpu_nothing_is_begun(toy, monkeypatch, kda):
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    code, _, err = kda("warm", "axpy")
    assert code == MissingRequirement.exit_code
    assert "kda: needs a GPU; without one `kda compile`" in err


def test_rows_are_chosen_by_pattern(toy, monkeypatch, kda):
    chosen = []
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr("kda_judge.session._gpu", lambda _: None)
    monkeypatch.setattr("kda_tools.project.export.portable.portable", lambda *_: nullcontext({}))
    monkeypatch.setattr(warm_caches, "fill", lambda sessions, *_: chosen.extend(map(frozen_rows, sessions)) or 0)
    assert kda("warm", "axpy", "--rows", "out*").code == 0
    assert [[row.id for row in rows] for rows in chosen] == [["out-64x16"]]
