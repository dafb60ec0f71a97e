"""The `kda` command: exit codes, what it says about bad input, and what it leaves behind.

Runs in this process; only the runs of `toy` start workers, about 2 s each.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kda_judge
import kda_runtime
import kda_tools
from core.judge.tests.records_factory import cpu_record, gpu_reading, make_record
from core.tools.tests.conftest import Answer, Kda
from kda_judge.contract import tasks
from kda_judge.contract.errors import ExitCode, KdaError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import gpu_state, provenance
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.gpu_state import GpuProcess
from kda_judge.evidence.ledger import append, read
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_judge.session import Session
from kda_tools import __version__, cli
from kda_tools.cli import measure as cli_measure
from kda_tools.cli.base import command_line, recordable
from kda_tools.cli.measure import _keep, _rehearsing
from kda_tools.project import validate as checks

SOURCES = import_path()
README = "# Toys\n<!-- kda:results:begin -->\n<!-- kda:results:end -->\n"
RUN = ("--device", "cpu", "--rows", "out*", "--generations", "1")
HEAVY = {"torch", "triton", "cutlass", "numpy", "pynvml", "pydantic", "rich"}
COMMANDS = [
    *("list", "bench", "validate", "tune", "compile", "profile", "sanitize", "fetch"),
    *("new", "doctor", "publish", "ledger", "rerun", "compare", "schema", "fleet"),
]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)


@pytest.fixture
def busy_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_reading().model_copy(update={"processes": (GpuProcess(pid=4242, memory_mb=1234),)})
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def python(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCES, "COLUMNS": "200", **more}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def add_arm(task: Task, name: str) -> None:
    config = task.path / "config.toml"
    config.write_text(f'{config.read_text()}\n[arms.{name}]\nmodule = "faulty.{name}"\ndevices = ["cpu"]\n')


# ---- bad names and options --------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "axyp"),
        ("validate", "axyp"),
        ("compile", "axyp"),
        ("fetch", "axyp"),
        ("new", "axyp", "saxpy"),
        ("ledger", "merge", "axyp", "other.jsonl"),
    ],
    ids=lambda command: command[0],
)
def test_unknown_task(checkout: Path, kda: Kda, command: tuple[str, ...]) -> None:
    answer = kda(*command)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert answer.err == "kda: unknown task 'axyp'; nearest: axpy\n"


@pytest.mark.parametrize("command", ["bench", "validate"])
def test_unknown_row(toy: Task, kda: Kda, command: str) -> None:
    answer = kda(command, "axpy", "--device", "cpu", "--rows", "out-64*", "--rows", "inplace-65x16")
    assert answer.code == ExitCode.USAGE
    assert "kda: --rows 'inplace-65x16': no such row; nearest: inplace-64x16, out-64x16\n" in answer.err


@pytest.mark.parametrize("option", ["--arm", "--against"])
def test_unknown_arm(checkout: Path, kda: Kda, option: str) -> None:
    answer = kda("bench", "axpy", "--device", "cpu", option, "soluton")
    assert answer.code == ExitCode.USAGE
    assert answer.err.startswith(f"kda: {option} 'soluton': no such arm; nearest: solution")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (("--samples", "0"), "--samples"),
        (("--generations", "0"), "--generations"),
        (("--device", "tpu"), "--device: expected auto, cpu, cuda or cuda:INDEX, got 'tpu'"),
        (("--agianst", "eager"), "--agianst"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_options(checkout: Path, kda: Kda, option: tuple[str, str], named: str) -> None:
    answer = kda("bench", "axpy", *option)
    assert answer.code == ExitCode.USAGE
    assert named in answer.err


def test_quacks_own_cache_is_off_unless_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a hash of QuACK's whole package, of which an arm has only some files; workers inherit the variable."""
    monkeypatch.setattr(cli, "_run", lambda: None)
    for given, expected in (("1", "1"), (None, "0")):
        monkeypatch.setenv("QUACK_CACHE_ENABLED", given or "")
        if given is None:
            monkeypatch.delenv("QUACK_CACHE_ENABLED")
        cli.main()
        assert os.environ["QUACK_CACHE_ENABLED"] == expected


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_arm_is_not_compared_with_itself(checkout: Path, kda: Kda, busy_gpu: None, device: str) -> None:
    answer = kda("bench", "axpy", "--device", device, "--against", "solution")
    assert answer.code == ExitCode.USAGE
    assert "--against 'solution': an arm cannot run against itself; --aa measures A/A" in answer.err


@pytest.mark.parametrize("command", ["bench", "validate", "compile"])
def test_a_pattern_that_fits_the_beginning_of_an_id(toy: Task, kda: Kda, command: str) -> None:
    answer = kda(command, "axpy", "--rows", "out")
    assert (answer.code, answer.out) == (ExitCode.USAGE, ""), "refused before anything is said to be good"
    assert answer.err == "kda: --rows 'out': fits the whole of no id; 'out*' fits 1 of 2\n"
    assert "'*64x16*' fits 2 of 2" in kda(command, "axpy", "--rows", "64x16").err


def test_profile_without_a_row_names_some(checkout: Path, kda: Kda) -> None:
    answer = kda("profile", "axpy")
    assert answer.code == ExitCode.USAGE
    said = "--row: expected the id of a row, for example out-64x16, inplace-64x16; all: kda list axpy"
    assert answer.err == f"kda: {said}\n"


def test_a_record_that_could_not_be_kept_is_refused_before_the_run(checkout: Path, kda: Kda) -> None:
    (checkout / "folder").mkdir()
    for path in ("absent/run.json", "folder"):
        answer = kda("bench", "axpy", *RUN, "--json", path)
        assert (answer.code, answer.out) == (ExitCode.USAGE, "")
        assert f"--json {path}: expected a file in a folder that exists" in answer.err


@pytest.mark.parametrize("columns", ["0", "x", ""])
def test_no_columns_are_no_width(checkout: Path, kda: Kda, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "toys/k90_axpy" in kda("list").out


def test_a_run_that_the_ledger_did_not_take_is_in_the_json(toy: Task, tmp_path: Path) -> None:
    record = make_record(toy)
    toy.ledger.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        _keep(toy, record, tmp_path / "run.json", into_ledger=True)
    assert read(tmp_path / "run.json") == [record]


# ---- what a GPU is needed for -----------------------------------------------------------------


@pytest.mark.parametrize("option", ["--arm", "--against"])
def test_an_arm_that_needs_a_gpu(checkout: Path, kda: Kda, no_gpu: None, option: str) -> None:
    answer = kda("bench", "axpy", option, "baseline")
    assert answer.code == ExitCode.REQUIREMENT
    assert answer.err == f"kda: {option} 'baseline': this arm needs a GPU; without one there are: eager, solution\n"


@pytest.mark.parametrize("command", ["bench", "validate"])
def test_device_cuda_without_a_gpu(checkout: Path, kda: Kda, no_gpu: None, command: str) -> None:
    answer = kda(command, "axpy", "--device", "cuda")
    assert answer.code == ExitCode.REQUIREMENT
    assert "kda: --device cuda: no NVIDIA GPU is visible here; `kda doctor` shows what was found" in answer.err


def test_record_without_a_gpu_runs_and_writes_nothing(checkout: Path, kda: Kda, no_gpu: None) -> None:
    answer = kda("bench", "axpy", "--record")
    assert answer.code == ExitCode.REQUIREMENT
    assert answer.err == "kda: --record: needs a GPU; a run without one measures nothing\n"
    assert not (checkout / "toys" / "k90_axpy" / "docs" / "ledger.jsonl").exists()


def test_a_busy_gpu_is_named_and_can_be_allowed(
    checkout: Path, kda: Kda, busy_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = kda("bench", "axpy")
    assert answer.code == ExitCode.REQUIREMENT
    assert "kda: the GPU is busy: NVIDIA H200 is held by pid 4242 (1234 MiB)" in answer.err
    assert "--allow-busy" in answer.err

    def next_step(*_: object) -> None:
        raise KdaError("the step after the check")

    monkeypatch.setattr(provenance, "collect", next_step)
    assert kda("bench", "axpy", "--allow-busy").err == "kda: the step after the check\n"


def test_rows_that_are_missing(checkout: Path, kda: Kda, busy_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(session: Session) -> None:
        raise KdaError(" ".join(session.settings.rows))

    monkeypatch.setattr(cli_measure, "_measure", asked)
    monkeypatch.setattr("kda_tools.publish.joined_runs.measured", lambda *_: {"out-64x16": True})
    assert kda("bench", "axpy", "--missing", "2").err == "kda: inplace-64x16\n"
    monkeypatch.setattr("kda_tools.publish.joined_runs.measured", lambda *_: {})
    assert kda("bench", "axpy", "--missing", "1").err == "kda: out-64x16\n"
    monkeypatch.setattr("kda_tools.publish.joined_runs.measured", lambda *_: {"out-64x16": False})
    assert kda("bench", "axpy", "--missing", "1").err == "kda: inplace-64x16\n", "what failed comes last"
    done = kda("bench", "axpy", "--missing", "1", "--rows", "none*")
    assert "none*" in done.err
    monkeypatch.setattr("kda_tools.publish.joined_runs.measured", lambda *_: {"out-64x16": True, "inplace-64x16": True})
    done = kda("bench", "axpy", "--missing", "1")
    assert (done.code, done.out) == (0, "axpy: every row has a result of these files on NVIDIA H200\n")


# ---- bad files --------------------------------------------------------------------------------


def test_a_bad_key_in_config(checkout: Path, kda: Kda) -> None:
    config = checkout / "toys" / "k90_axpy" / "config.toml"
    edit(config, "generations = 2", "generatoins = 2")
    answer = kda("bench", "axpy", *RUN)
    assert answer.code == ExitCode.USAGE
    assert answer.err == f"kda: {config}: unknown key 'bench.generatoins'; did you mean generations?\n"


@pytest.mark.parametrize("command", ["bench", "validate"])
def test_a_row_that_breaks_the_contract(toy: Task, kda: Kda, command: str) -> None:
    edit(toy.path / "bench" / "workloads.toml", "shape = [64, 16], dtype", "shape = [63, 16], dtype")
    answer = kda(command, "axpy", "--device", "cpu", "--rows", "out*")
    assert answer.code == ExitCode.USAGE
    (line,) = [line for line in answer.err.splitlines() if "contract" in line]
    assert line.startswith(f"kda: {toy.path / 'bench'}")
    assert "row 'out-64x16' breaks the contract of axpy: y: expected x's shape" in line


@pytest.mark.parametrize(
    ("sizes", "ids", "said"),
    [
        ((4, 5), ("odd",), "row 'odd' breaks the contract of axpy: y: expected x's shape (4, 8), got (5, 8)"),
        ((4, 4), ("same", "same"), "kda: {}: duplicate workload id 'same'"),
    ],
)
def test_a_grid_row_that_is_wrong(toy: Task, kda: Kda, sizes: tuple[int, int], ids: tuple[str, ...], said: str) -> None:
    grid = toy.path / "bench" / "grid.py"
    grid.write_text(
        "from kda_judge.contract.tensor_spec import TensorSpec\n"
        "from kda_judge.contract.workloads import Workload\n\n\n"
        "def grid():\n"
        f"    x, y = (TensorSpec(shape=(n, 8), dtype='float32') for n in {sizes})\n"
        f"    for name in {ids}:\n"
        "        yield Workload(id=name, op='axpy', inputs={'x': x, 'y': y}, scalars={'factor': 2})\n\n\n"
        "thin = list\n"
    )
    answer = kda("validate", "axpy", "--device", "cpu")
    assert answer.code == ExitCode.USAGE
    assert said.format(grid) in answer.err


def test_a_reference_without_the_op(toy: Task, kda: Kda) -> None:
    reference = toy.path / "bench" / "reference.py"
    edit(reference, "axpy_ = axpy\n", "")
    answer = kda("bench", "axpy", *RUN)
    assert answer.code == ExitCode.USAGE
    assert answer.err == f"kda: {reference}: expected a function 'axpy_', the oracle of that op\n"


@pytest.mark.parametrize("command", [("publish",), ("publish", "--check"), ("validate", "axpy", "--static")])
def test_a_broken_ledger(checkout: Path, kda: Kda, command: tuple[str, ...]) -> None:
    ledger = checkout / "toys" / "k90_axpy" / "docs" / "ledger.jsonl"
    ledger.write_text('{"schema_version": 1\n')
    (checkout / "README.md").write_text(README)
    answer = kda(*command)
    assert answer.code == ExitCode.LEDGER
    assert f"{ledger}:1: not valid JSON" in answer.err
    assert not (ledger.parent / "results.md").exists()


def test_a_pin_that_is_not_here(kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(Path(__file__).parents[3]))
    monkeypatch.setenv("KDA_CACHE", str(tmp_path))
    answer = kda("fetch", "qknorm_rope", "--offline")
    assert answer.code == ExitCode.REQUIREMENT
    assert "sglang" in answer.err


# ---- runs with real workers -------------------------------------------------------------------


def test_a_run_without_a_gpu(toy: Task, kda: Kda, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    answer = kda("bench", "axpy", *RUN, "--json", str(path))
    assert answer.code == ExitCode.OK, answer.err
    # Plain progress where there is no terminal: 1 row of 3 phases.
    assert re.search(r"^\[1/3\] out-64x16: verify, about \d+ s left$", answer.err, re.MULTILINE)
    assert "\x1b" not in answer.err + answer.out
    assert re.search(r"^\s*out-64x16\s.*\bCORRECT\s*$", answer.out, re.MULTILINE)
    assert "an NVIDIA GPU would add" in answer.out
    assert "compiled ahead of time, not run" in answer.out
    assert f"record written to {path}" in answer.out
    # Times of a CPU are no result: none is printed and none is kept.
    assert not re.search(r"\d\s*(us|µs|ms|ns)\b", answer.out)
    (record,) = read(path)
    assert record.command == f"kda bench axpy {' '.join(RUN)} --json run.json".replace("out*", "'out*'")
    assert (record.machine.kind, record.settings.against, record.settings.rows) == ("cpu", ("eager",), ("out*",))
    assert [(row.id, row.verdict) for row in record.rows] == [("out-64x16", Verdict.CORRECT)]
    assert mismatches(record) == []
    kept = json.loads(path.read_bytes())["rows"][0]
    assert (kept["limit"], kept["speedup"], kept["attained"]) == (None, {}, None)
    for arm in kept["arms"].values():
        assert (arm["samples"], arm["summary"], arm["calls_per_sample"]) == ({}, {}, None)
    assert not (toy.path / "docs" / "ledger.jsonl").exists()


def test_without_a_gpu_nothing_says_measure() -> None:
    shown: list[tuple[str, str]] = []
    report = _rehearsing(lambda row, phase: shown.append((row, phase)))
    report("a", "verify")
    report("a", "measure 2/3")
    assert shown == [("a", "verify"), ("a", "rehearse 2/3")]


@pytest.mark.parametrize(
    ("arm", "code", "words"),
    [
        ("one_wrong_element", ExitCode.UNFIT_ROWS, "out-64x16: INCORRECT: one_wrong_element: output 'out': 1 of 128"),
        ("raises", ExitCode.ARM_FAILED, "out-64x16: ERROR: arm 'raises' raised RuntimeError: no such kernel image"),
    ],
)
def test_an_arm_that_fails(toy: Task, kda: Kda, arm: str, code: ExitCode, words: str) -> None:
    add_arm(toy, arm)
    answer = kda("bench", "axpy", *RUN, "--arm", arm)
    assert answer.code == code
    assert words in answer.out


def test_a_failed_arm_weighs_more_than_a_wrong_row(toy: Task, kda: Kda) -> None:
    """`wrong_shape` also lacks the in-place op."""
    edit(toy.path / "config.toml", 'module = "solution"', 'module = "faulty.wrong_shape"')
    answer = kda("validate", "axpy", "--device", "cpu")
    assert answer.code == ExitCode.ARM_FAILED
    assert "out-64x16: INCORRECT: solution: output 'out': expected shape [8, 16], got [16, 8]" in answer.out
    assert "inplace-64x16: ERROR: arm 'solution' raised AttributeError" in answer.out
    assert "axpy: 0 of 2 rows agree with the oracle" in answer.out
    assert (
        answer.out.splitlines()[-1] == "axpy: failed: files and published numbers (named before the rows); 2 of 2 rows"
    )


GRID = (
    "from kda_judge.contract.tensor_spec import TensorSpec\n"
    "from kda_judge.contract.workloads import Workload\n\n\n"
    "def grid():\n"
    "    x = TensorSpec(shape=(4, 8), dtype='float32')\n"
    "    for n in range(3):\n"
    "        yield Workload(id=f'row-{n}', op='axpy', inputs={'x': x, 'y': x}, scalars={'factor': n})\n\n\n"
    "thin = list\n"
)


def test_the_last_line_of_validate_says_what_failed(toy: Task, kda: Kda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows agree, and the exit code is 1: hundreds of lines earlier something was said of files."""
    answer = kda("validate", "axpy", "--device", "cpu", "--rows", "out*")
    assert answer.code == ExitCode.UNFIT_ROWS
    *_, rows, last = answer.out.splitlines()
    assert rows.startswith("axpy: 1 of 1 rows agree with the oracle")
    assert last == "axpy: failed: files and published numbers (named before the rows)"
    monkeypatch.setattr(checks, "problems", lambda task: [])
    answer = kda("validate", "axpy", "--device", "cpu", "--rows", "out*")
    assert answer.code == ExitCode.OK
    assert answer.out.splitlines()[-1].startswith("axpy: 1 of 1 rows agree with the oracle")


def test_validate_names_rows_on_which_an_opponent_is_wrong(
    toy: Task, kda: Kda, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toy.path / "bench" / "grid.py").write_text(GRID)
    wrong = "factor * x + y + (1 if factor != 1 and x.numel() == 32 else 0)"
    edit(toy.path / "baseline" / "__init__.py", "factor * x + y", wrong)
    monkeypatch.setattr(checks, "problems", lambda task: [])
    answer = kda("validate", "axpy", "--device", "cpu")
    assert answer.code == ExitCode.OK
    *_, rows, last = answer.out.splitlines()
    assert rows.startswith("axpy: 5 of 5 rows agree with the oracle")
    assert last == "axpy: 2 rows on which eager itself is outside the tolerance or refuses: row-0, row-2"


def test_validate_with_a_limit_says_how_many_rows_it_left_out(
    toy: Task, kda: Kda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "problems", lambda task: [])
    answer = kda("validate", "axpy", "--device", "cpu", "--limit-s", "0")
    assert answer.code == ExitCode.OK
    assert answer.out.splitlines()[-1] == "axpy: 1 of 2 rows checked, 1 not: --limit-s 0"


# ---- publish, list, doctor, merge -------------------------------------------------------------


def test_published_pages_and_a_changed_digit(task: Task, kda: Kda, tmp_path: Path) -> None:
    append(task.ledger, make_record(task))
    assert kda("publish", "--check").code == ExitCode.UNFIT_ROWS
    assert kda("publish").code == ExitCode.OK
    assert kda("publish", "--check") == Answer(ExitCode.OK, "", "")
    edit(tmp_path / "README.md", "95%", "99%")
    answer = kda("publish", "--check")
    assert answer.code == ExitCode.UNFIT_ROWS
    assert answer.out.startswith(f"{tmp_path / 'README.md'}:")


def test_a_sound_task_passes_the_static_checks(checkout: Path, kda: Kda) -> None:
    (checkout / "README.md").write_text(README)
    assert kda("publish").code == ExitCode.OK
    assert kda("validate", "axpy", "--static") == Answer(ExitCode.OK, "axpy: files and published numbers: ok\n", "")
    (checkout / "toys" / "k90_axpy" / "prompt.md").unlink()
    answer = kda("validate", "axpy", "--static")
    assert answer.code == ExitCode.UNFIT_ROWS
    assert answer.err == f"{checkout / 'toys' / 'k90_axpy' / 'prompt.md'}: missing\n"


def test_list_shows_every_task(checkout: Path, kda: Kda) -> None:
    answer = kda("list")
    assert answer.code == ExitCode.OK
    (line,) = [line for line in answer.out.splitlines() if "axpy" in line]
    for cell in ("toys/k90_axpy", "A task for tests", " 2 "):
        assert cell in line
    assert not [line for line in answer.out.splitlines() if line.endswith(" ")], "a table fills its lines up"


def test_list_cuts_no_name_on_a_narrow_terminal(kda: Kda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(Path(__file__).parents[3]))
    monkeypatch.setenv("COLUMNS", "80")
    words = kda("list").out.split()
    assert {"norm_tanh_mul_add", "diffusion/k04_norm_tanh_mul_add"} <= set(words)
    narrow = kda("list", "rotary_embedding").out
    assert max(map(len, narrow.splitlines())) <= 80
    assert {row.id for row in find_task("rotary_embedding").workloads} <= set(narrow.split())


def test_list_shows_the_arms_and_rows_of_a_task(checkout: Path, kda: Kda) -> None:
    answer = kda("list", "toys/k90_axpy/")
    assert answer.code == ExitCode.OK
    assert "arms: baseline (cuda), eager (cuda, cpu), solution (cuda, cpu)" in answer.out
    call = r"axpy\(x: float32\[64, 16\], y: float32\[64, 16\], factor="
    assert re.search(rf"^out-64x16 +0\.012 MB\n    {call}", answer.out, re.MULTILINE)
    assert re.search(r"^inplace-64x16 +0\.008 MB$", answer.out, re.MULTILINE), "in place one tensor less"


def test_list_shows_the_others_beside_a_broken_task(checkout: Path, kda: Kda) -> None:
    broken = checkout / "toys" / "k91_broken" / "config.toml"
    broken.parent.mkdir()
    broken.write_text("[tsak]\n")
    answer = kda("list")
    assert answer.code == ExitCode.USAGE
    assert re.search(r"broken +toys/k91_broken +- +cannot be read", answer.out)
    assert "A task for tests" in answer.out
    assert f"kda: {broken}: " in answer.err


@pytest.mark.parametrize("command", [("list",), ("fetch",), ("publish",), ("compare", "a", "b"), ("bench", "axpy")])
def test_where_there_are_no_tasks(
    kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    answer = kda(*command)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert answer.err.startswith("kda: no tasks found; run inside a checkout")


def test_a_wheel_that_is_no_pinned_one(kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(Path(__file__).parents[3]))
    monkeypatch.setenv("KDA_CACHE", str(tmp_path))
    pinned = find_task("qknorm_rope").config.upstream["sglang-0.5.23"].wheel
    (tmp_path / "sglang.whl").touch()
    for path in (tmp_path / "sglang.whl", tmp_path / pinned):
        answer = kda("fetch", "qknorm_rope", "--offline", "--wheel", str(path))
        assert answer.code == ExitCode.USAGE
        assert f"--wheel {path}: expected a file with a pinned name, " in answer.err
        assert pinned in answer.err


def test_doctor_runs_anywhere(kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KDA_ROOT", raising=False)
    answer = kda("doctor")
    assert answer.code == ExitCode.OK
    for name in ("python", "gpu", "torch", "nvcc"):
        assert re.search(rf"^(ok|missing) +{name} ", answer.out, re.MULTILINE), answer.out


def test_doctor_keeps_to_the_columns(kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(Path(__file__).parents[3]))
    monkeypatch.setenv("KDA_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    lines = kda("doctor").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if "sglang-" in line] == [
        ["missing", "sglang-0.5.12.post1"],
        ["missing", "sglang-0.5.23"],
    ]


def test_merge_brings_the_runs_of_another_machine(task: Task, kda: Kda, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append(other, make_record(task))
    assert kda("ledger", "merge", "fake", str(other)).out.startswith("1 new run in ")
    assert task.ledger.read_bytes() == other.read_bytes()
    for name, content, words in (("absent", None, "file not found"), ("empty", "", "got an empty file")):
        if content is not None:
            (tmp_path / name).write_text(content)
        answer = kda("ledger", "merge", "fake", str(tmp_path / name))
        assert (answer.code, answer.out) == (ExitCode.USAGE, "")
        assert words in answer.err


def test_merge_refuses_what_was_not_measured(task: Task, kda: Kda, tmp_path: Path) -> None:
    other = tmp_path / "run.json"
    append(other, cpu_record(task))
    answer = kda("ledger", "merge", "fake", str(other))
    assert (answer.code, answer.out) == (ExitCode.LEDGER, "")
    assert f"kda: {other}:1: run " in answer.err
    assert not task.ledger.exists()


# ---- faults that no command foresaw -----------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "file", "code"),
    [
        ("bench", "bench/reference.py", ExitCode.USAGE),
        ("bench", "solution/__init__.py", ExitCode.ARM_FAILED),
        ("validate", "bench/reference.py", ExitCode.USAGE),
        ("validate", "solution/__init__.py", ExitCode.ARM_FAILED),
        ("compile", "solution/__init__.py", ExitCode.ARM_FAILED),
        ("tune", "bench/tune.py", ExitCode.USAGE),
        ("tune", "solution/__init__.py", ExitCode.ARM_FAILED),
    ],
)
def test_a_syntax_error_is_named_by_file_and_line(toy: Task, kda: Kda, command: str, file: str, code: ExitCode) -> None:
    (toy.path / "bench" / "tune.py").write_text("from .. import solution\nSWEEPS = ()\n")
    (toy.path / file).write_text("import torch\n\ndef launches(op):\n    return (\n")
    answer = kda("compile", "axpy") if command == "compile" else kda(command, "axpy", "--device", "cpu")
    assert answer.code == code, answer.err
    assert "Traceback" not in answer.err
    if code is ExitCode.ARM_FAILED and command in ("bench", "validate"):
        said = "out-64x16: ERROR: arm 'solution' raised SyntaxError: '(' was never closed (__init__.py, line 4)"
        assert said in answer.out
    else:
        assert answer.err.endswith(f"kda: {toy.path / file}:4: SyntaxError: '(' was never closed\n")


def test_what_a_task_raises_is_its_own_fault(toy: Task, kda: Kda) -> None:
    """The last line of the task on the way is named, and the calls from there on follow."""
    hook = toy.path / "solution" / "__init__.py"
    edit(hook, "    return []", "    return [] / 0")
    number = hook.read_text().splitlines().index("    return [] / 0") + 1
    answer = kda("compile", "axpy")
    assert answer.code == ExitCode.ARM_FAILED
    assert answer.err.startswith(f"kda: {hook}:{number}: TypeError: unsupported operand")
    assert f'File "{hook}", line {number}, in launches' in answer.err
    assert "typer" not in answer.err


def test_a_name_that_a_task_lacks(toy: Task, kda: Kda) -> None:
    (toy.path / "bench" / "tune.py").write_text("SWEEP = ()\n")
    answer = kda("tune", "axpy", "--device", "cpu")
    assert answer.code == ExitCode.USAGE
    assert answer.err == f"kda: {toy.path / 'bench' / 'tune.py'}: expected 'SWEEPS' in it, found none\n"


def test_a_file_that_a_task_lacks(toy: Task, kda: Kda) -> None:
    (toy.path / "bench" / "reference.py").unlink()
    answer = kda("bench", "axpy", *RUN)
    assert (answer.code, answer.err) == (
        ExitCode.USAGE,
        f"kda: {toy.path / 'bench' / 'reference.py'}: file not found\n",
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), ExitCode.REQUIREMENT, "pip install 'torch>="),
        (ModuleNotFoundError("No module named 'torch.x'", name="torch.x"), ExitCode.INTERNAL, "Traceback"),
        (PermissionError(13, "Permission denied", "ledger"), ExitCode.REQUIREMENT, "kda: ledger: Permission denied"),
        (OSError(30, "Read-only file system", "x"), ExitCode.REQUIREMENT, "kda: x: Read-only file system"),
        (OSError(28, "No space left on device"), ExitCode.REQUIREMENT, "kda: No space left on device"),
        (FileNotFoundError(2, "No such file", "x"), ExitCode.INTERNAL, "Traceback"),
        (SyntaxError("invalid", (str(Path(cli.__file__)), 1, 1, "")), ExitCode.INTERNAL, "Traceback"),
        (AttributeError("no", name="x", obj=cli), ExitCode.INTERNAL, "Traceback"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_is_no_bug_in_kda(
    checkout: Path, kda: Kda, monkeypatch: pytest.MonkeyPatch, error: Exception, code: ExitCode, words: str
) -> None:
    def fail() -> list[Task]:
        raise error

    monkeypatch.setattr(tasks, "all_tasks", fail)
    answer = kda("list")
    assert answer.code == code
    assert words in answer.err


def test_a_site_where_no_folder_can_be(checkout: Path, kda: Kda) -> None:
    (checkout / "file").touch()
    answer = kda("site", "--out", "file/site")
    assert answer.code == ExitCode.USAGE
    assert answer.err == "kda: --out file/site: expected a place for a folder, got: Not a directory\n"


# ---- start-up ---------------------------------------------------------------------------------


def test_the_version(kda: Kda) -> None:
    assert kda("--version") == Answer(0, f"kda {__version__}\n", "")


def test_the_installed_script_finds_the_tasks(checkout: Path, tmp_path: Path) -> None:
    """pip's script puts its own folder on the path and nothing of the checkout; `kda` is run from anywhere in it."""
    script = tmp_path / "bin" / "kda"
    script.parent.mkdir()
    script.write_text("import sys\nfrom kda_tools.cli import main\nsys.exit(main())\n")
    below = checkout / "toys" / "k90_axpy" / "solution"
    for folder, root in ((below, ""), (script.parent, str(checkout))):
        done = python(str(script), "compile", "axpy", cwd=folder, KDA_ROOT=root)
        assert done.returncode == ExitCode.OK, done.stderr


def test_the_module_is_the_command(checkout: Path) -> None:
    """`python -m kda_tools` and the entry point of the installed `kda` print and return the same."""
    assert '\nkda = "kda_tools.cli:main"\n' in (Path(__file__).parents[1] / "pyproject.toml").read_text()
    entry_point = "import sys; from kda_tools.cli import main; sys.argv[0] = 'kda'; sys.exit(main())"
    for arguments, code in ((["list"], ExitCode.OK), (["bench", "axyp"], ExitCode.USAGE)):
        one = python("-m", "kda_tools", *arguments, cwd=checkout)
        two = python("-c", entry_point, *arguments, cwd=checkout)
        assert (one.returncode, one.stdout, one.stderr) == (two.returncode, two.stdout, two.stderr)
        assert one.returncode == code, one.stderr


@pytest.mark.parametrize("dirty", [False, True])
def test_a_run_that_may_not_be_published_is_told_so_before_it_begins(tmp_path, monkeypatch, capsys, dirty) -> None:
    """A GPU's time is gone by the time that the ledger's page says it."""
    state = provenance.GitState("0123456789abcdef" * 2 + "01234567", dirty)
    monkeypatch.setattr(provenance, "git_state", lambda _: state)
    recordable(tmp_path / "ledger.jsonl")
    said = capsys.readouterr().err
    assert ("the files are not those of commit 0123456789" in said) is dirty
    recordable(None)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("commands", "allowed"), [([""], set()), (COMMANDS, {"pydantic"})], ids=["kda", "commands"])
def test_help_imports_nothing_heavy(tmp_path: Path, commands: list[str], allowed: set[str]) -> None:
    """Of the commands' own help typer itself imports pydantic."""
    script = (
        "import contextlib, io, sys\n"
        "from kda_tools import cli\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['kda', *filter(None, [command]), '--help']\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        cli.main()\n"
        "    assert 'Usage: kda' in shown.getvalue(), command\n"
        f"print(*sorted({HEAVY - allowed} & set(sys.modules)))\n"
    )
    asked = python("-c", script, cwd=tmp_path)
    assert (asked.returncode, asked.stdout.strip()) == (0, ""), asked.stderr


def test_help_is_fast(tmp_path: Path) -> None:
    """Processor time of the best of five: unlike the wall clock it does not depend on what else the machine does."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(5):
        before = spent()
        asked = python("-m", "kda_tools", "--help", cwd=tmp_path)
        times.append(spent() - before)
        assert asked.returncode == 0, asked.stderr
    assert all(f"  {name}  " in asked.stdout for name in COMMANDS)
    assert min(times) < 0.3, times


def test_the_recorded_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["kda", "bench", "axpy", "--rows", "out*", "--json", str(tmp_path / "run.json")])
    assert command_line() == "kda bench axpy --rows 'out*' --json run.json"


def test_a_harness_of_another_checkout_is_named(kda: Kda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core" / "judge" / "src" / "kda_judge").mkdir(parents=True)
    (tmp_path / "noxfile.py").write_text("")
    (tmp_path / "inside").mkdir()
    monkeypatch.delenv("KDA_ROOT", raising=False)
    monkeypatch.chdir(tmp_path / "inside")
    told = kda("list").err
    assert f"not that of the checkout {tmp_path}" in told
    assert str(Path(tasks.__file__).parents[1]) in told
    monkeypatch.chdir(Path(__file__).parents[3])
    assert kda("list").err == ""
    for folder in (Path(str(module.__file__)).parent for module in (kda_judge, kda_runtime, kda_tools)):
        source = tmp_path / "core" / folder.name.removeprefix("kda_") / "src" / folder.name
        shutil.copytree(folder, source, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "inside")
    assert "warning" not in kda("list").err, "the same harness elsewhere, as in a campaign's worktree"
    (source / "new.py").write_text("")
    assert f"not that of the checkout {tmp_path}" in kda("list").err


def test_an_arm_of_the_command_line_is_judged_like_any_other(checkout: Path, kda: Kda, tmp_path: Path) -> None:
    port = tmp_path / "somewhere" / "faster"
    shutil.copytree(checkout / "toys" / "k90_axpy" / "solution", port)
    named, out = f"mine={port}", tmp_path / "run.json"
    answer = kda("bench", "axpy", "--port", named, "--arm", "mine", "--device", "cpu", "--json", str(out))
    assert answer.code == ExitCode.OK, answer.err
    run = RunRecord.model_validate_json(out.read_text())
    assert {"mine", "eager"} <= set(run.rows[0].arms)
    assert run.provenance.hashes["port mine"] == run.provenance.hashes["solution"]
    port.joinpath("__init__.py").write_text("def axpy(x, y, *, factor): return x + y\n")
    wrong = kda("bench", "axpy", "--port", named, "--arm", "mine", "--device", "cpu", "--rows", "out*")
    assert wrong.code == ExitCode.UNFIT_ROWS
    for arguments, told in (
        (("--port", "mine"), "--port 'mine': expected NAME=DIR"),
        (("--port", named, "--port", named), "with another name each time"),
        (("--port", f"eager={port}"), "expected a name that no arm of the task has: baseline, eager, solution"),
        (("--port", f"mine={tmp_path}"), "expected the folder of a package, found no __init__.py"),
        (("--port", named, "--record"), "--record: a task's ledger holds whole runs of its own arms"),
    ):
        refused = kda("bench", "axpy", "--device", "cpu", *arguments)
        assert (refused.code, told in refused.err) == (ExitCode.USAGE, True), refused.err


@pytest.mark.parametrize(("value", "came"), [("x", "'x'"), ("-1", "'-1'")])
def test_an_option_of_a_wrong_value_says_what_came(kda, value: str, came: str) -> None:
    found = kda("bench", "norm_infer", f"--samples={value}")
    assert found.code == 2
    assert found.err.splitlines()[-1].startswith("Error: Invalid value for '--samples': Input should be ")
    assert found.err.count(came) == 1


def test_a_message_that_has_the_value_does_not_get_it_again(kda) -> None:
    assert kda("model", "step", "flux", "--arm", "foo").err.count("'foo'") == 1
