"""Bad input of every kind ends as one message that names its source, and as an exit code: never as a traceback.

The tables are run in this process and start no worker. `kda` itself is started only for what ends it from outside: a
signal, a reader that leaves, a full disk.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.judge.tests.conftest import listen_to_interrupts
from core.judge.tests.processes import until, workers_of
from core.judge.tests.records_factory import make_checkout, make_record
from core.tools.tests.conftest import Kda
from kda_judge.contract.config import Bench
from kda_judge.contract.errors import ExitCode
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_judge.evidence.ledger import append, read
from kda_tools.cli.base import MOST

TASK = "toys/k90_axpy"
CONFIG, ROWS, LEDGER = f"{TASK}/config.toml", f"{TASK}/bench/workloads.toml", f"{TASK}/docs/ledger.jsonl"
SOLUTION, REFERENCE = f"{TASK}/solution/__init__.py", f"{TASK}/bench/reference.py"
ONE_ROW = ("--device", "cpu", "--rows", "out*")
DEEP = 5_000
ENVIRONMENT = {**os.environ, "PYTHONPATH": import_path()}
HUGE = str(10**30)

Refuse = Callable[..., str]
tried: list[str] = []
"""Every bad input that was tried, for the count at the end."""


@pytest.fixture
def refuse(checkout: Path, kda: Kda) -> Refuse:
    """`refuse(what, command, code)`: the command ends so and without a traceback; returns what it said on stderr."""
    (checkout / TASK / "docs").mkdir(exist_ok=True)
    (checkout / "README.md").write_text("# Toys\n<!-- kda:results:begin -->\n<!-- kda:results:end -->\n")

    def run(what: str, command: tuple[str, ...], *codes: int) -> str:
        tried.append(what)
        code, out, err = kda(*command)
        assert "Traceback" not in out + err, f"{what}: {err[-3000:]}"
        assert code in codes, f"{what}: {out}{err}"
        return err

    return run


# ---- files that are none ----------------------------------------------------------------------------


def _folder(path: Path) -> None:
    path.mkdir(parents=True)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": _bytes(b""),
    "not UTF-8": _bytes(b"\xff\xfe\x00k\n"),
    "a byte order mark": _bytes(b"\xef\xbb\xbf\x01\n"),
    "zero bytes": _bytes(bytes(64) + b"\n"),
    "deep lists": _bytes(b"x = " + DEEP * b"[" + DEEP * b"]" + b"\n"),
    "deep objects": _bytes(DEEP * b'{"a":' + b"1" + DEEP * b"}" + b"\n"),
    "300 lists": _bytes(b"x = " + 300 * b"[" + 300 * b"]" + b"\n"),
    "5000 digits": _bytes(b"x = " + 5000 * b"9" + b"\n"),
    "5000 hexadecimal digits": _bytes(b"x = 0x" + 5000 * b"f" + b"\n"),
    "5000 digits in JSON": _bytes(5000 * b"9" + b"\n"),
    "a page of the web": _bytes(b"<html><body>Not found</body></html>\n"),
    "a folder": _folder,
    "a link to itself": _loop,
}
"""What can be in the place of a text file."""
READERS: dict[str, tuple[str, ...]] = {
    CONFIG: ("list", "axpy"),
    ROWS: ("list", "axpy"),
    LEDGER: ("compare", "a", "b"),
    f"{TASK}/docs/grid.jsonl": ("publish", "--check"),
    f"{TASK}/docs/profile.jsonl": ("publish", "--check"),
    f"{TASK}/docs/sanitize.jsonl": ("publish", "--check"),
    f"{TASK}/docs/tuning.jsonl": ("publish", "--check"),
    f"{TASK}/docs/iterations.jsonl": ("publish", "--check"),
    f"{TASK}/docs/ports.jsonl": ("publish", "--check"),
    f"{TASK}/docs/dispatch.md": ("validate", "axpy", "--static"),
    f"{TASK}/docs/results.md": ("publish",),
    f"{TASK}/prompt.md": ("validate", "axpy", "--static"),
    f"{TASK}/bench/tune.py": ("tune", "axpy", "--derive"),
    REFERENCE: ("list", "axpy"),
    SOLUTION: ("compile", "axpy"),
    "README.md": ("publish",),
    "other.jsonl": ("ledger", "merge", "axpy", "other.jsonl"),
}
"""File -> a command that reads it."""


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", READERS)
def test_a_file_that_is_none(checkout: Path, refuse: Refuse, file: str, damage: str) -> None:
    """Some files may be empty, and a link to itself counts as no file. Anything else is refused by name."""
    path = checkout / file
    path.unlink(missing_ok=True)
    DAMAGE[damage](path)
    said = refuse(f"{file}: {damage}", READERS[file], *ExitCode)
    assert file in said or not said.startswith("kda:") or damage in ("empty", "a link to itself")


@pytest.mark.parametrize("make", [_loop, os.mkfifo])
def test_a_config_that_is_no_file_is_named(checkout: Path, refuse: Refuse, make: Callable[[Path], object]) -> None:
    (checkout / CONFIG).unlink()
    make(checkout / CONFIG)
    assert f"{CONFIG}: expected a file of TOML" in refuse("no file", ("list", "axpy"), ExitCode.USAGE)


# ---- values that are none ---------------------------------------------------------------------------

VALUES = [
    (CONFIG, "rtol = 1e-5", "rtol = inf", "key 'tolerance.float32.rtol': Input should be less than 1, got inf"),
    (CONFIG, "rtol = 1e-5", "rtol = nan", "key 'tolerance.float32.rtol'"),
    (CONFIG, "rtol = 1e-5", "rtol = 1.0", "key 'tolerance.float32.rtol'"),
    (CONFIG, "rtol = 1e-5", "rtol = -1e-5", "key 'tolerance.float32.rtol'"),
    (CONFIG, "rtol = 1e-5", 'rtol = "small"', "key 'tolerance.float32.rtol'"),
    (CONFIG, "rtol = 1e-5", "rtol = [1e-5]", "key 'tolerance.float32.rtol'"),
    (CONFIG, "rtol = 1e-5", "rtol = 2026-11-22", "key 'tolerance.float32.rtol'"),
    (CONFIG, "atol = 1e-5", "atol = inf", "key 'tolerance.float32.atol'"),
    (CONFIG, "atol = 1e-5", "atol = nan", "key 'tolerance.float32.atol'"),
    (CONFIG, "atol = 1e-5", "atol = -0.1", "key 'tolerance.float32.atol'"),
    (CONFIG, "generations = 2", f"generations = {HUGE}", "key 'bench.generations': Input should be less than"),
    (CONFIG, "generations = 2", "generations = 2.5", "key 'bench.generations'"),
    (CONFIG, "generations = 2", "generations = true", "key 'bench.generations'"),
    (CONFIG, "generations = 2", f"samples = {HUGE}", "key 'bench.samples'"),
    (CONFIG, "generations = 2", f"target_sample_us = {HUGE}", "key 'bench.target_sample_us'"),
    (CONFIG, "generations = 2", "seeds = [1, 1, 2]", "key 'bench.seeds': Value error, expected seeds that all differ"),
    (CONFIG, "generations = 2", "seeds = [1, 2]", "key 'bench.seeds'"),
    (CONFIG, "generations = 2", "seeds = [1, 2, -3]", "key 'bench.seeds.2'"),
    (CONFIG, "generations = 2", f"seeds = [1, 2, {HUGE}]", "key 'bench.seeds.2'"),
    (CONFIG, "timeout_s = 20", f"timeout_s = {HUGE}", "key 'bench.timeout_s'"),
    (CONFIG, "timeout_s = 20", "timeout_s = nan", "key 'bench.timeout_s'"),
    (CONFIG, "[targets.h200]", "[targets.h200]\nattained = nan", "key 'targets.h200.attained'"),
    (CONFIG, "[targets.h200]", "[targets.h200]\ndevice = -0.5", "key 'targets.h200.device'"),
    (CONFIG, "[targets.h200]", "[targets.h200]\nwall_vs_latest = inf", "key 'targets.h200.wall_vs_latest'"),
    (CONFIG, '"sm_90a"', '"banana"', "key 'targets.h200.capability'"),
    (CONFIG, '"sm_90a"', '""', "key 'targets.h200.capability'"),
    (CONFIG, '"sm_90a"', '"sm_90a --version"', "key 'targets.h200.capability'"),
    (CONFIG, '"sm_90a"', "90", "key 'targets.h200.capability'"),
    (CONFIG, 'module = "solution"', 'module = "../solution"', "key 'arms.solution.module'"),
    (CONFIG, 'module = "solution"', 'module = "solution.py "', "key 'arms.solution.module'"),
    *(
        (CONFIG, "[task]", f'[upstream.x]\n{key} = "../a"\n[task]', f"key 'upstream.x.{key}': String should match")
        for key in ("package", "version", "platform")
    ),
    (CONFIG, "[task]", "task = 5\n[other]", "key 'task'"),
    (CONFIG, "[task]", "[[task]]", "key 'task'"),
    (CONFIG, "[bench]", "[bench]\n[bench]", "not valid TOML"),
    (ROWS, "shape = [64, 16]", "shape = [-64, 16]", "key 'workload.0.inputs.x.shape.0'"),
    (ROWS, "shape = [64, 16]", f"shape = [{2**63}]", "key 'workload.0.inputs.x.shape.0'"),
    (ROWS, "stride = [48, 1]", f"stride = [{2**63}, 1]", ".inputs.y.stride.0'"),
    (ROWS, "shape = [64, 16]", 'shape = "64x16"', "key 'workload.0.inputs.x.shape'"),
    (ROWS, 'dtype = "float32"', 'dtype = "float33"', "key 'workload.0.inputs.x.dtype'"),
    (ROWS, "stride = [48, 1]", "stride = [48]", "stride has 1 entries"),
    (ROWS, 'id = "out-64x16"', 'id = ""', "key 'workload.0.id'"),
    (ROWS, 'id = "out-64x16"', 'id = "a/../b"', "key 'workload.0.id'"),
    (ROWS, 'op = "axpy"', 'op = "axpi"', "key 'op'"),
    (ROWS, "[[workload]]", "[workload]", ""),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), VALUES, ids=[one[2].split("\n")[-1] for one in VALUES])
def test_a_value_that_is_none(checkout: Path, refuse: Refuse, file: str, old: str, new: str, said: str) -> None:
    path = checkout / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    err = refuse(f"{file}: {new}", ("list", "axpy"), ExitCode.USAGE)
    assert err.startswith(f"kda: {path}: ")
    assert said in err


# ---- arguments --------------------------------------------------------------------------------------

LONG = 300 * "a"
ARGUMENTS = [
    *(
        ("list", name)
        for name in ("", "..", "/", "~", "-", LONG, 20 * f"{LONG}/", "loop", "file", "\udcff", "a\nb", "*")
    ),
    *(("new", "axpy", name) for name in ("", "../x", "a b", "A", "llm/k01_\u00e9", "core/k01_x", LONG, "k1_x")),
    *(("export", "axpy", name) for name in ("file", "file/x", "toys", "a-b", LONG, "loop")),
    ("export", "axpy", "package", "--form", "zip"),
    ("site", "--out", "file"),
    ("site", "--out", "file/site"),
    ("site", "--out", "loop"),
    *(("compare", name, "x") for name in ("", "x", "\udcff")),
    *(("ledger", "merge", "axpy", name) for name in ("", "absent", "toys", "loop", LONG, "/dev/null")),
    *(("bench", "axpy", "--device", name) for name in ("", "gpu", "cuda:", "cuda:-1", "cpu:1", "CPU", "cuda:\u0661x")),
    ("bench", "axpy", "--device", f"cuda:{'9' * 5000}"),
    *(("bench", "axpy", *ONE_ROW[:2], "--rows", name) for name in ("", "[", "(", "[!", "out", "\udcff", 100 * "*a")),
    *(("bench", "axpy", "--generations", name) for name in ("0", "-1", "nan", "2.5", HUGE, "", "9" * 5000)),
    *(("bench", "axpy", "--samples", name) for name in ("0", "x", HUGE)),
    *(("bench", "axpy", *ONE_ROW, "--json", name) for name in ("absent/x", "toys", "file/x", "loop", LONG)),
    *(("bench", "axpy", *ONE_ROW, "--json", name) for name in ("README.md", f"{TASK}/config.toml", "link.json")),
    *(("model", "trace", "file", "--json", name) for name in ("README.md", "new.jsonl")),
    ("fleet", "run", "axpy", "--timeout-s", "0"),
    ("campaign", "review", "--person", " "),
    ("campaign", "ako", "export", "axpy", ""),
    *(("validate", "axpy", "--limit-s", name) for name in ("nan", "-1", "inf", "-inf", "x", "1e400")),
    *(("tune", "axpy", "--limit-s", name) for name in ("nan", "-1")),
    *(("tune", "axpy", "--rounds", name) for name in ("2", HUGE)),
    ("profile", "axpy", "--row", "x"),
    ("sanitize", "axpy", "--tool", "x"),
    ("compile", "axpy", "--arm", "x"),
    ("fetch", "axpy", "--wheel", "loop"),
    ("lock", "axpy", "--pin", "x"),
    ("knowledge", "kernel", "--most", HUGE),
    ("unheard",),
]


@pytest.mark.parametrize("command", ARGUMENTS, ids=lambda command: ascii(" ".join(command))[:60])
def test_an_argument_that_is_none(checkout: Path, refuse: Refuse, command: tuple[str, ...]) -> None:
    (checkout / "file").touch()
    (checkout / "link.json").symlink_to(checkout / "README.md")
    _loop(checkout / "loop")
    assert refuse(ascii(command)[:200], command, ExitCode.USAGE, ExitCode.REQUIREMENT)


def test_what_may_be_asked_for_is_what_a_task_may_ask_for() -> None:
    for field in ("generations", "samples"):
        assert Bench.model_json_schema()["properties"][field]["maximum"] == MOST


@pytest.mark.parametrize("variable", ["KDA_ROOT", "KDA_CACHE"])
@pytest.mark.parametrize("value", ["absent/x", "file", "loop", LONG, "/dev/null", "/proc/1/x"])
def test_an_environment_that_is_none(
    checkout: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    (checkout / "file").touch()
    _loop(checkout / "loop")
    monkeypatch.setenv("KDA_ROOT", str(Path(__file__).parents[3]))
    monkeypatch.setenv(variable, value)
    command = ("list",) if variable == "KDA_ROOT" else ("fetch", "qknorm_rope", "--offline")
    assert refuse(f"{variable}={value}", command, ExitCode.USAGE, ExitCode.REQUIREMENT)


# ---- what a task's Python files answer --------------------------------------------------------------

ONE = "def launches(*_): return [One()]\nclass One:\n    name = variant = 'x'\n"
HOOKS = [
    "launches = 5",
    "def launches(op, inputs, scalars): return None",
    "def launches(op, inputs, scalars): return 5",
    "def launches(op, inputs, scalars): return 'kernel'",
    "def launches(op, inputs, scalars): return [None]",
    "def launches(op, inputs, scalars): return {1: 2}",
    "def launches(op): return []",
    "def launches(op, inputs, scalars): yield 1 / 0",
    "def launches(op, inputs, scalars): return launches(op, inputs, scalars)",
    "def launches(op, inputs, scalars): return list(inputs)[0].name",
    "def launches(op, inputs, scalars): raise SystemError",
    f"{ONE}    compile = 5\n",
    f"{ONE}    def compile(self, target): return None\n",
    f"{ONE}    def compile(self, target): 1 / 0\n",
    f"{ONE}    cubin, dynamic_shared_bytes = b'no code', 0\n    def compile(self, target): return self\n",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_answers_nonsense(checkout: Path, refuse: Refuse, hook: str) -> None:
    with (checkout / SOLUTION).open("a") as file:
        file.write(f"\n\n{hook}\n")
    assert refuse(hook, ("compile", "axpy"), ExitCode.ARM_FAILED, ExitCode.REQUIREMENT)


@pytest.mark.parametrize("target", ["sm_12", "sm_999", "sm_123a", "sm_00", "sm_130f"])
def test_a_target_that_no_compiler_knows(checkout: Path, refuse: Refuse, target: str) -> None:
    config = checkout / CONFIG
    config.write_text(config.read_text().replace('"sm_90a"', f'"{target}"'))
    said = refuse(target, ("compile", "axpy"), ExitCode.USAGE)
    assert said.startswith(f"kda: {config}: key 'capability' of a target: expected one that the compilers here know")


GRIDS = [
    "def grid(): return None",
    "def grid(): return [5]",
    "def grid(): yield from ()",
    "grid = thin = 5",
    "def grid(row): return []",
    "def thin(rows): return [None]\ndef grid(): return []",
]


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_that_is_none(checkout: Path, refuse: Refuse, grid: str) -> None:
    (checkout / f"{TASK}/bench/grid.py").write_text(f"{grid}\n")
    assert refuse(grid, ("validate", "axpy", "--device", "cpu", "--rows", "absent"), ExitCode.USAGE)


@pytest.mark.parametrize("sweeps", ["SWEEPS = 5", "SWEEPS = [5]", "SWEEPS = None", "SWEEPS = 'x'"])
def test_sweeps_that_are_none(checkout: Path, refuse: Refuse, sweeps: str) -> None:
    (checkout / f"{TASK}/bench/tune.py").write_text(f"{sweeps}\n")
    assert refuse(sweeps, ("tune", "axpy", "--derive"), ExitCode.USAGE)


# ---- what comes from outside ------------------------------------------------------------------------


def test_a_ledger_on_a_full_disk(
    checkout: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing of a line stays that did not fit, and the message names the ledger."""
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    task = make_checkout(tmp_path)
    append(tmp_path / "other.jsonl", make_record(task))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    said = refuse("a full disk", ("ledger", "merge", "fake", "other.jsonl"), ExitCode.REQUIREMENT)
    assert said == f"kda: {task.ledger}: No space left on device\n"
    assert task.ledger.read_bytes() == b""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    tried.append(command)
    script = command.replace("kda ", f"{sys.executable} -m kda_tools ")
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("kda list | head -0; exit ${PIPESTATUS[0]}", ExitCode.UNREAD, ""),
        ("kda list | true; exit ${PIPESTATUS[0]}", ExitCode.UNREAD, ""),
        ("kda list axyp 2>&1 | true; exit ${PIPESTATUS[0]}", ExitCode.UNREAD, ""),
        ("kda list > /dev/full", ExitCode.REQUIREMENT, "kda: the output cannot be written: No space left on device\n"),
        ("kda list >&-", ExitCode.OK, ""),
    ],
)
def test_output_that_nobody_takes(checkout: Path, command: str, code: ExitCode, said: str) -> None:
    done = shell(command, checkout)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_run_outlives_the_reader_of_its_output(checkout: Path) -> None:
    done = shell(
        "kda bench axpy --device cpu --generations 1 --json run.json 2>&1 | true; exit ${PIPESTATUS[0]}", checkout
    )
    assert done.returncode == ExitCode.UNREAD
    (record,) = read(checkout / "run.json")
    assert len(record.rows) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_keeps_what_was_measured_as_ctrl_c_does(checkout: Path, number: signal.Signals) -> None:
    """The second row hangs; the first one is in the record."""
    tried.append(number.name)
    path = checkout / SOLUTION
    hangs = f"    open({str(checkout / 'called')!r}, 'w').close()\n    __import__('time').sleep(600)\n    x.copy_"
    path.write_text(path.read_text().replace("    x.copy_", hangs))
    command = [sys.executable, "-m", "kda_tools", "bench", "axpy", "--device", "cpu", "--json", "run.json"]
    with subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=listen_to_interrupts) as process:
        assert until((checkout / "called").exists, seconds=60)
        process.send_signal(number)
        assert process.wait(60) == ExitCode.INTERRUPTED
    (record,) = read(checkout / "run.json")
    assert record.partial
    assert record.rows
    assert until(lambda: not workers_of(Task(checkout / TASK)))


@pytest.fixture(scope="module", autouse=True)
def _count() -> Iterator[None]:
    yield
    print(f"\n{len(tried)} bad inputs tried")
