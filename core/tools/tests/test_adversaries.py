"""Every adversary through the real judge; the table, the files, the committed page and method_limits.md in step."""

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from core.judge.tests.conftest import listen_to_interrupts
from kda_judge.contract.errors import ExitCode, LedgerError
from kda_judge.contract.task_import import import_path
from kda_judge.evidence import gpu_state
from kda_judge.evidence.run_record import Verdict
from kda_tools.lab.adversaries import __main__ as command
from kda_tools.lab.adversaries import page, share, suite
from kda_tools.lab.adversaries.table import ADVERSARIES, ARMS, Adversary, Ending, Kind

BY_NAME = {one.name: one for one in ADVERSARIES}
CPU = [one.name for one in ADVERSARIES if one.cpu]
CUDA = [one.name for one in ADVERSARIES if one.cuda]
METHOD = page.RECORDS.parent / "method_limits.md"


def started(request: pytest.FixtureRequest, kind: Kind):
    """Start every adversary that this session asks for; at the end show the table, which is what a log is read for."""
    asked = {item.callspec.params["name"] for item in request.session.items if item.originalname == f"test_on_{kind}"}
    begin = time.monotonic()
    with suite.started([BY_NAME[name] for name in sorted(asked)], kind) as futures:
        yield futures
        done = [future.result() for future in futures.values() if not future.cancel()]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        command.show(done, kind, time.monotonic() - begin)


@pytest.fixture(scope="module")
def on_cpu(request):
    yield from started(request, "cpu")


@pytest.fixture(scope="module")
def on_cuda(request):
    yield from started(request, "cuda")


@pytest.mark.parametrize("name", CPU)
def test_on_cpu(on_cpu, name):
    assert on_cpu[name].result().wrong is None


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_state.has_gpu(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CUDA)
def test_on_cuda(on_cuda, name):
    assert on_cuda[name].result().wrong is None


@pytest.mark.parametrize(
    ("expected", "ended", "verdict", "runs"),
    [
        (None, [Verdict.INVALID, Verdict.CORRECT], Verdict.CORRECT, 2),
        (None, [Verdict.INVALID] * 4, Verdict.INVALID, suite.TRIES),
        (Verdict.INCORRECT, [Verdict.INCORRECT], Verdict.INCORRECT, 1),
        (Verdict.INVALID, [Verdict.INVALID], Verdict.INVALID, 1),
    ],
)
def test_only_a_row_whose_times_must_not_count_is_run_again(monkeypatch, expected, ended, verdict, runs):
    left = [SimpleNamespace(verdict=one, reason="") for one in ended]
    monkeypatch.setattr(suite, "_judged", lambda *_: (None, left.pop(0)))
    assert suite._looped(None, Ending(expected), None) == (verdict, "")
    assert len(ended) - len(left) == runs


# ---- the table, the files and the documents -----------------------------------------------------


def test_every_file_is_in_the_table_and_every_entry_has_its_file():
    assert sorted(BY_NAME) == sorted(path.stem for path in ARMS.glob("*.py") if path.stem != "__init__")
    assert len(BY_NAME) == len(ADVERSARIES)


@pytest.mark.parametrize("one", ADVERSARIES, ids=list(BY_NAME))
def test_every_file_says_what_it_does_and_what_catches_it(one):
    does, _, catches = one.docstring.partition("\n\nCaught by: ")
    assert does.endswith(".")
    assert len(does) < 200
    endings = [ending for ending in (one.cpu, one.cuda) if ending]
    passes = all(ending.name == "passes" for ending in endings)
    assert catches.startswith("nothing") == passes
    assert catches.startswith("nothing, and needs not be: ") == (passes and all(ending.caught for ending in endings))


def test_method_names_what_is_not_caught():
    text = METHOD.read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", text)) & set(BY_NAME)
    assert named == {one.name for one in ADVERSARIES if not all(e.caught for e in (one.cpu, one.cuda) if e)}


def test_the_committed_page_is_what_the_records_give():
    assert page.RECORDS.with_suffix(".md").read_text(encoding="utf-8") == page.page(page.read(page.RECORDS))


def test_the_recorded_runs_are_of_these_adversaries_and_went_as_expected():
    latest = page.latest(page.read(page.RECORDS))
    assert latest["cpu"].results == {one.name: one.cpu.name for one in ADVERSARIES if one.cpu}
    assert page.differing(latest["cuda"]) == []
    assert latest["cuda"].results.keys() <= set(CUDA)


# ---- the command ----------------------------------------------------------------------------------


def test_a_difference_is_shown_and_fails_the_command(monkeypatch, capsys):
    wrong = dataclasses.replace(BY_NAME["raises_on_import"], cpu=Ending(Verdict.INCORRECT))
    monkeypatch.setattr(command, "ADVERSARIES", (wrong,))
    assert command.main(["--device", "cpu"]) == ExitCode.UNFIT_ROWS
    out, err = capsys.readouterr()
    assert re.search(
        r"raises_on_import\s+INCORRECT\s+ERROR\s+WRONG\s+expected INCORRECT, got ERROR: arm 'raises_on", out
    )
    assert re.search(
        r"\[1/1\] raises_on_import: ERROR WRONG, \d+ s \(start [\d.]+, verify [\d.]+\): expected INCORR", err
    )
    assert "0 end as expected, 0 of these are known not to be caught, 1 differ" in out


@pytest.mark.parametrize(
    ("verdict", "reason", "wrong"),
    [
        (Verdict.INCORRECT, "got nan", None),
        (Verdict.INCORRECT, "got inf", "INCORRECT as expected, but the reason lacks 'nan': got inf"),
        (Verdict.CORRECT, "correct", "expected INCORRECT, got CORRECT: correct"),
    ],
)
def test_verdict_and_words_are_compared(verdict, reason, wrong):
    one = Adversary("any", cpu=Ending(Verdict.INCORRECT, "nan"), cuda=None)
    assert suite.JudgedRow(one, "cpu", verdict, reason).wrong == wrong


@pytest.fixture
def ended_at_once(monkeypatch):
    """Every adversary ends as expected on a CPU, and is not run."""

    def ended(one):
        ending, future = one.cpu, Future()
        changed = ending.words if ending.noisy else ""
        future.set_result(suite.JudgedRow(one, "cpu", ending.verdict or Verdict.CORRECT, ending.words, changed))
        return future

    monkeypatch.setattr(
        suite, "started", lambda adversaries, kind: nullcontext({one.name: ended(one) for one in adversaries})
    )


def test_a_record_makes_the_page(ended_at_once, tmp_path):
    path = tmp_path / "runs.jsonl"
    for _ in range(2):
        command.main(["--device", "cpu", "--record", str(path)])
    first, second = page.read(path)
    assert first.results == second.results == {name: BY_NAME[name].cpu.name for name in CPU}
    assert first.gpus == 1
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert f"- **CPU**: {second.machine}, {second.utc}" in text
    assert "- **GPU**: not run yet" in text
    assert f"- **CPU**: 8 x {second.machine}" in page.page([second.model_copy(update={"gpus": 8})])
    assert re.search(
        r"^\| `nan` \| One element is not a number. \| INCORRECT \| INCORRECT \| not run \|$", text, re.MULTILINE
    )
    assert re.search(r"^\| `side_stream` \| .* \| GPU: INVALID \| - \| not run \|$", text, re.MULTILINE)


def test_a_run_that_ends_early_is_kept_and_a_later_one_runs_what_is_missing(
    ended_at_once, monkeypatch, tmp_path, capsys
):
    path = tmp_path / "runs.jsonl"
    whole = ["--device", "cpu", "--record", str(path)]
    command.main(whole)

    def interrupt_at_the_third(got, line=command.line):
        if len(page.read(path)[-1].results) == 3:
            raise KeyboardInterrupt
        return line(got)

    for arguments, so_far in ((whole, 3), ([*whole, "--missing"], 6)):
        with monkeypatch.context() as patch:
            patch.setattr(command, "line", interrupt_at_the_third)
            assert command.main(arguments) == ExitCode.INTERRUPTED
        assert capsys.readouterr().err.endswith(f"{path}, and --missing runs the others\n")
        ended = page.latest(page.read(path))["cpu"].results  # which ones: those that come first of a set
        assert len(ended) == so_far
        text = path.with_suffix(".md").read_text(encoding="utf-8")
        assert f"**ended early**, after 3 of {len(CPU) - so_far + 3} adversaries\n" in text
        assert text.count("| not run | not run |") + text.count("| not run | - |") == len(CPU) - so_far
        escaped = {name for name in CPU if not BY_NAME[name].cpu.caught}
        assert ("CPU expected" in text) == bool(escaped - ended.keys())
    command.main([*whole, "--missing"])
    assert [(line.partial, line.missing) for line in page.read(path)] == [
        (False, False),
        (True, False),
        (True, True),
        (False, True),
    ]
    assert page.latest(page.read(path))["cpu"].results == {name: BY_NAME[name].cpu.name for name in CPU}
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert text.count("- **CPU**: ") == 3, "the runs that results are from"
    assert text.count("; these alone: `") == 2
    assert "CPU expected" not in text
    assert command.main([*whole, "--missing"]) == ExitCode.OK
    assert f"every adversary has the expected result on the CPU: {path}" in capsys.readouterr().out
    assert len(page.read(path)) == 4


def test_one_that_ended_otherwise_runs_again(tmp_path, capsys):
    recorded = page.latest(page.read(page.RECORDS))["cpu"]
    otherwise = recorded.model_copy(update={"results": recorded.results | {"raises_on_import": "passes"}})
    path = tmp_path / "adversaries.jsonl"
    path.write_text(otherwise.model_dump_json() + "\n", encoding="utf-8")
    assert command.main(["--device", "cpu", "--record", str(path), "--missing"]) == ExitCode.OK
    assert "[1/1] raises_on_import: ERROR ok" in capsys.readouterr().err
    assert page.latest(page.read(path))["cpu"].results == recorded.results


def test_what_no_run_stands_behind_is_called_expected(monkeypatch):
    gpu_alone = dataclasses.replace(BY_NAME["detects_the_profiler"], cuda=Ending(None, missed="a kernel less"))
    both = dataclasses.replace(BY_NAME["nan"], cpu=Ending(None, missed="all"), cuda=Ending(None, missed="all"))
    changed = {gpu_alone.name, both.name}
    others = (*(one for one in ADVERSARIES if one.name not in changed), both)
    cpu = next(line for line in page.read(page.RECORDS) if line.kind == "cpu")
    gpu_run = cpu.model_copy(update={"kind": "cuda", "results": {name: BY_NAME[name].cuda.name for name in CUDA}})
    monkeypatch.setattr(page, "ADVERSARIES", (*others, gpu_alone))
    lines = {
        kinds: {line.split("`")[1]: line.split(" | ")[1] for line in text.splitlines() if line.startswith("| `")}
        for kinds, records in (("cpu", [cpu]), ("both", [cpu, gpu_run]), ("none", []))
        if (text := page.page(records).partition("## Not caught")[2])
    }
    assert {kinds: found["nan"] for kinds, found in lines.items()} == {
        "cpu": "CPU; GPU expected",
        "both": "CPU and GPU",
        "none": "CPU expected; GPU expected",
    }
    assert [lines[kinds]["detects_the_profiler"] for kinds in lines] == ["GPU expected", "GPU", "GPU expected"]
    assert '"expected", no run of the suite on one stands behind it yet; 1 of these' in page.page([cpu])
    assert '"expected", no run' not in page.page([cpu, gpu_run])
    monkeypatch.setattr(page, "ADVERSARIES", others)
    assert '"expected", no run of the suite on one stands behind it yet.\n' in page.page([cpu])


def test_a_record_of_a_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["nan", "--record", "runs.jsonl"])
    assert "--record: expected a run of the whole suite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"), [(b"{}\n", "1: utc: Field required"), (b"\xff\n", "1: line: Invalid JSON")]
)
def test_a_broken_record_is_named(content, words, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    assert command.main(["--device", "cpu", "--record", str(path), "--missing"]) == LedgerError.exit_code
    assert f"{path}:{words}" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_record_in_no_folder_is_refused_before_the_run(tmp_path, capsys):
    path = tmp_path / "absent" / "runs.jsonl"
    assert command.main(["--device", "cpu", "--record", str(path), "--missing"]) == ExitCode.USAGE
    assert f"--record {path}: expected a folder that exists, got {path.parent}" in capsys.readouterr().err


# ---- several GPUs, and an early end ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "count", "cores", "names"),
    [
        (None, 3, 8, ["0", "1", "2"]),
        ("3, GPU-1f", 2, 8, ["3", "GPU-1f"]),
        ("3,x,4", 1, 8, ["3"]),
        (None, 8, 2, ["0", "1"]),
    ],
)
def test_devices_are_named_as_they_are_visible(monkeypatch, visible, count, cores, names):
    monkeypatch.delenv(share.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(share.VISIBLE, visible)
    monkeypatch.setattr(gpu_state, "_nvml", nullcontext)
    monkeypatch.setattr(gpu_state, "_visible", lambda _: [object()] * count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert share.devices() == names


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Where processes started from here put their checkouts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for either process")


@needs_two_cores
def test_two_processes_share_the_adversaries(temporary):
    chosen = [BY_NAME[name] for name in ("raises_on_import", "lacks_the_op")]
    with share.started(chosen, "cpu", ["0", "1"]) as futures:
        results = [futures[one.name].result() for one in chosen]
    assert [(got.adversary, got.wrong) for got in results] == [(one, None) for one in chosen]
    assert not any(temporary.glob("kda-adversary-*"))


@needs_two_cores
def test_a_process_that_dies_is_an_error_that_names_what_it_ran(temporary):
    chosen = [BY_NAME[name] for name in ("hangs", "nan")]

    def lose_one():
        with share.started(chosen, "cpu", ["0", "1"]) as futures:
            while not futures["hangs"].running():
                time.sleep(0.01)
            (child,) = (one for one in multiprocessing.active_children() if one.name == "of device 0")
            child.kill()
            futures["hangs"].result()

    with pytest.raises(share.ShareDied, match="the process of device 0 ended with exit code -9 while it ran hangs"):
        lose_one()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_early_end_drops_the_rest_and_keeps_what_was_found(temporary, by):
    path = temporary / "runs.jsonl"
    run = [sys.executable, "-m", "kda_tools.lab.adversaries", "--device", "cpu", "--record", str(path)]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    with subprocess.Popen(
        run,
        cwd=page.RECORDS.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    ) as process:
        first = re.match(r"\[1/\d+\] ([a-z_]+): ([A-Za-z]+) ok, \d+ s", process.stderr.readline())
        assert first
        process.send_signal(by)
        out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert re.search(rf"^{first[1]} +{first[2]} +{first[2]} +ok", out, re.MULTILINE)
    ended = re.search(r"interrupted: (\d) of \d+ adversaries had ended; these are in ", err)
    (line,) = page.read(path)
    assert line.partial
    assert len(line.results) == int(ended[1])
    assert line.results[first[1]] == first[2]
    assert not any(temporary.glob("kda-adversary-*"))


# ---- what only a GPU can judge ---------------------------------------------------------------------

STAND_IN = """
import contextlib, importlib, sys, types
import torch
import kda_judge.arms.arm_worker as worker

class Stream:
    pass

class Event:
    def elapsed_time(self, other):
        return 8.0

class CUDAGraph:
    def replay(self):
        raise AssertionError("replayed")

torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph = Stream, Event, CUDAGraph
torch.cuda.stream = lambda stream: contextlib.nullcontext()

def arm(name):
    return importlib.import_module(f"toys.k90_axpy.faulty.{name}")

x, y = torch.randint(1, 9, (2, 8, 16)).float()  # whole numbers: 3 * x + y has one result, with or without fma
patches = ("patches_elapsed_time", "shaves_elapsed_time", "replaces_the_event", "patches_synchronize",
           "patches_graph_replay", "side_stream", "moves_the_other_arm")
for name in patches:
    assert torch.equal(arm(name).axpy(x, y, factor=3), 3 * x + y), name
stale, empty = arm("trusts_stale_memory").axpy, torch.empty
torch.empty = lambda *sizes, **more: empty(*sizes, **more).fill_(-1)  # or it may find what was freed above
assert torch.equal(stale(x, y, factor=3), torch.add(y, x, alpha=3))
left = 3 * x + y
torch.empty = lambda *_, **__: left
left[-1] = torch.add(y[-1], x[-1], alpha=3)
left[0] = 0  # wrong, and not looked at
assert not bool(stale(x, y, factor=3)[0].any())
assert torch.cuda.Event.__module__.endswith("replaces_the_event")
assert torch.cuda.Event().elapsed_time(None) < 1e-3
assert Event().elapsed_time(None) == 4.0 * 0.97
assert torch.cuda.synchronize("cuda:0") is None
assert CUDAGraph().replay() is None

small = x.bfloat16()
honest = torch.tanh(small.float() * 1e-4).to(small.dtype)
for name in ("detects_the_profiler", "forges_the_kernel_count"):
    squash = arm(name).squash
    calls = [squash(small, factor=1e-4) for _ in range(50)]
    assert any(not bool(call.any()) for call in calls), name
with torch.profiler.profile():
    calls = [arm("detects_the_profiler").squash(small, factor=1e-4) for _ in range(50)]
assert sum(bool(call.any()) for call in calls) > sum(not bool(call.any()) for call in calls)
assert worker.Worker.profile(None, 20).kernels == 20

remembers = arm("remembers_in_a_capture").axpy
torch.cuda.is_current_stream_capturing = lambda: True
out = remembers(x, y, factor=3)
x += 1
assert remembers(x, y, factor=3) is out
torch.cuda.is_current_stream_capturing = lambda: False
assert torch.equal(remembers(x, y, factor=3), 3 * x + y)

late = arm("patches_the_worker")
late._hand_back = lambda self, result: result.clone()
out = late.axpy(x, y, factor=3)
for _ in range(2):  # as a graph's output, replay after replay
    x += 1
    assert torch.equal(worker.Worker._hand_back(None, out), torch.add(y, x, alpha=3))
"""


def test_what_only_a_gpu_judges_does_what_it_says(tmp_path):
    """Their code on CPU tensors, with stand-ins for the names of torch.cuda that they take or patch."""
    suite.place(tmp_path)
    (tmp_path / "try.py").write_text(STAND_IN)
    ran = subprocess.run(
        [sys.executable, "try.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert all(f'"{one.name}"' in STAND_IN for one in ADVERSARIES if not one.cpu)
