"""What a record says ran: commit, hashes, pins, versions."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import kda_judge
from core.judge.tests.records_factory import COMMIT, WHEEL, make_checkout
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import provenance
from kda_judge.evidence.provenance import content_hash, git_state, hashes, pins, run_id, utc, versions


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_checkout(tmp_path)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    monkeypatch.delenv(provenance.DIRTY_VARIABLE, raising=False)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_harness_is_every_file_of_the_judge_but_those_that_cannot_decide(task, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "kda_judge"
    shutil.copytree(Path(kda_judge.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kda_judge, "__file__", str(folder / "__init__.py"))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} > provenance.NOT_DECIDING
    before = hashes(task)["harness"]
    for name in provenance.NOT_DECIDING:
        (folder / name).write_text("# another\n")
    assert hashes(task)["harness"] == before
    (folder / "judge" / "new_check.py").write_text("")
    assert hashes(task)["harness"] != before


def test_a_module_of_the_judge_that_moves_into_another_folder_changes_the_harness(task, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "kda_judge"
    shutil.copytree(Path(kda_judge.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kda_judge, "__file__", str(folder / "__init__.py"))
    before = hashes(task)["harness"]
    (folder / "judge" / "verdict.py").rename(folder / "arms" / "verdict.py")
    assert hashes(task)["harness"] != before


def test_every_part_changes_its_own_hash_and_no_other(task: Task) -> None:
    before = hashes(task)
    assert set(before) == {"solution", "baseline", "workloads", "reference", "config", "harness"}
    edits = {
        "solution": task.path / "solution" / "tuned" / "h200.toml",
        "baseline": task.path / "baseline" / "sglang-1.0.sha256",
        "workloads": task.path / "bench" / "workloads.toml",
        "reference": task.path / "bench" / "reference.py",
        "config": task.path / "config.toml",
    }
    for part, path in edits.items():
        old = path.read_bytes()
        path.write_bytes(old + b"\n# changed\n")
        after = hashes(task)
        assert {name for name in before if before[name] != after[name]} == {part}
        path.write_bytes(old)


def test_a_file_that_left_the_baseline_still_counts_as_it_was(task: Task) -> None:
    baseline, moved = task.path / "baseline", task.path / "baseline" / provenance.MOVED
    (baseline / "sites.toml").write_text("[[site]]\n")
    before = hashes(task)
    moved.write_text(f"{hashlib.sha256((baseline / 'sites.toml').read_bytes()).hexdigest()}  sites.toml\n")
    with pytest.raises(UsageError, match=r"moved\.sha256:1: expected a file that is no longer there, got sites\.toml"):
        hashes(task)
    (baseline / "sites.toml").rename(task.path / "sites.toml")
    assert hashes(task) == before
    (task.path / "sites.toml").write_text("[[site]] # another one\n")
    assert hashes(task) == before
    (baseline / "eager.py").write_text("# another one\n")
    assert hashes(task)["baseline"] != before["baseline"]
    moved.write_text("sites.toml\n")
    with pytest.raises(UsageError, match=r"moved\.sha256:1: expected sha256, two spaces and a path, got 'sites\.toml'"):
        hashes(task)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime of a few modules, some in a folder, in the place of the real one."""
    folder = tmp_path / "kda_runtime"
    for name, text in {
        "__init__.py": "",
        "errors.py": "",
        "launch.py": "from kda_runtime.errors import wrong\nfrom kda_runtime import native\n",
        "native.py": "",
        "native.c": "int one;\n",
        "rows/__init__.py": "from .device import load\n",
        "rows/device.py": "def load():\n    from ..broadcast import form\n",
        "broadcast.py": "",
        "unused.py": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(provenance, "_runtime", lambda: folder)
    return folder


NATIVE = ["launch.py", "native.c", "native.py"]
ROWS = ["broadcast.py", "rows/__init__.py", "rows/device.py"]


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("import torch\nfrom . import kda_runtime\n", []),
        ("from kda_runtime.launch import Launch\n", NATIVE),
        ("def f():\n    import kda_runtime.rows as r\n", ROWS),
        ("from kda_runtime import native, rows\n", ["broadcast.py", "native.c", "native.py", *ROWS[1:]]),
        ("from kda_runtime.rows.device import load\nfrom kda_runtime.errors import wrong\n", [ROWS[0], ROWS[2]]),
    ],
)
def test_the_library_is_what_the_solution_imports_of_the_runtime(task, runtime, source, files) -> None:
    (task.path / "solution" / "inner").mkdir()
    (task.path / "solution" / "inner" / "kernel.py").write_text(source)
    assert provenance.library(task.path / "solution") == files
    assert hashes(task).get("library") == (content_hash(runtime, files) if files else None)


def test_a_module_of_the_runtime_that_moves_into_a_folder_changes_the_library(task, runtime) -> None:
    """As a module, as a package, and as one of another folder; what it is built from moves along."""
    (task.path / "solution" / "kernel.py").write_text("from kda_runtime.native import load\n")
    before = hashes(task)["library"]
    (runtime / "native").mkdir()
    (runtime / "native.py").rename(runtime / "native" / "__init__.py")
    moved = hashes(task)["library"]
    assert moved != before
    (runtime / "native" / "__init__.py").write_text("# another\n")
    assert hashes(task)["library"] != moved
    (runtime / "native" / "__init__.py").rename(runtime / "rows" / "native.py")
    (task.path / "solution" / "kernel.py").write_text("from kda_runtime.rows.native import load\n")
    (runtime / "rows" / "native.cu").write_text("")
    assert "rows/native.cu" in provenance.library(task.path / "solution")


@pytest.mark.parametrize("source", ["import kda_runtime", "from kda_runtime import lunch", "import kda_runtime.a.b.c"])
def test_an_import_that_leads_to_no_file_is_an_error(task, runtime, source) -> None:
    (task.path / "solution" / "kernel.py").write_text(f"\n{source}\n")
    with pytest.raises(
        UsageError, match=r"kernel.py:2: expected an import of a module of kda_runtime, got kda_runtime"
    ):
        hashes(task)


def test_cuda_sources_are_part_of_the_solution(task) -> None:
    before = hashes(task)
    (task.path / "solution" / "csrc").mkdir()
    for name in ("kernel.cu", "kernel.cuh"):
        (task.path / "solution" / "csrc" / name).write_text("// one\n")
        after = hashes(task)
        assert after["solution"] != before["solution"]
        before = after


@pytest.mark.parametrize("content", [b"import kda_runtime.triton_rows\ndef (\n", b"\0", b"\xff"])
def test_a_file_that_is_no_python_is_left_to_its_worker(task: Task, content: bytes) -> None:
    before = provenance.hashes(task)
    (task.path / "solution" / "broken.py").write_bytes(content)
    assert provenance.library(task.path / "solution") == provenance.library(task.path / "baseline")
    assert provenance.hashes(task)["solution"] != before["solution"]


def test_what_tuning_may_choose_from_is_no_part(task: Task) -> None:
    """Only what it chose is, in the solution."""
    before = hashes(task)
    (task.path / "bench" / "tune.py").write_text("SWEEPS = ()\n")
    assert hashes(task) == before
    (task.path / "solution" / "tuned.toml").write_text("")
    assert hashes(task)["solution"] != before["solution"]
    assert content_hash(task.path / "solution", ["**/*"], without=["tuned.toml"]) == before["solution"]


def test_a_hash_is_what_sha256sum_would_give(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"two\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").write_bytes(b"one\n")
    lines = f"{hashlib.sha256(b'one' + bytes([10])).hexdigest()}  a/c.py\n"
    lines += f"{hashlib.sha256(b'two' + bytes([10])).hexdigest()}  b.py\n"
    assert content_hash(tmp_path, ["**/*"]) == hashlib.sha256(lines.encode()).hexdigest()


def test_line_endings_and_caches_do_not_matter_but_names_do(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\ny = 2\n")
    before = content_hash(tmp_path, ["**/*"])
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"\0")
    (tmp_path / "__pycache__" / "b.cpython-312.pyc.139872").write_bytes(b"\0")  # Python is writing it
    assert content_hash(tmp_path, ["**/*"]) == before
    (tmp_path / "__pycache__" / "hidden.py").write_bytes(b"x = 3\n")
    assert content_hash(tmp_path, ["**/*"]) != before, "a solution could import it"
    (tmp_path / "__pycache__" / "hidden.py").unlink()
    (tmp_path / ".hidden.json").write_bytes(b"{}")
    assert content_hash(tmp_path, ["**/*"]) != before, "a solution could read it"
    (tmp_path / ".hidden.json").unlink()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert content_hash(tmp_path, ["**/*"]) != before


@pytest.mark.parametrize(
    "name", ["__pycache__/table.json", "__pycache__/kernel.so", ".ruff_cache/table.json", ".hidden"]
)
def test_what_a_solution_could_read_is_part_of_it_wherever_it_lies(task: Task, name: str) -> None:
    before, path = hashes(task), task.path / "solution" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    assert hashes(task)["solution"] != before["solution"]


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    """No pattern looks behind it, and a solution could import from there."""
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "a.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "solution" / "parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"solution/parts: expected a folder of its own, got a link"):
        content_hash(tmp_path / "solution", ["**/*"])


def test_binary_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "table.bin").write_bytes(b"\0\r\n")
    before = content_hash(tmp_path, ["*"])
    (tmp_path / "table.bin").write_bytes(b"\0\n")
    assert content_hash(tmp_path, ["*"]) != before


def test_nothing_to_hash_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected files 'config\.toml'"):
        content_hash(tmp_path, ["config.toml"])


def test_git_commit_and_dirty(task: Task, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == provenance.GitState("unknown", dirty=True), "no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == provenance.GitState(commit, dirty=False)
    task.ledger.parent.mkdir()
    task.ledger.write_text("{}\n")
    for folder in ("docs", "llm/docs", "llm/docs/plots", "diffusion/models/docs"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ("a.svg" if folder.endswith("plots") else "steps.jsonl")).write_text("{}\n")
    (tmp_path / "README.md").write_text("changed\n")
    assert not git_state(tmp_path).dirty, "logs, plots and Markdown decide no number, wherever they are"
    (task.path / "solution" / "extra.py").write_text("")
    assert git_state(tmp_path).dirty, "untracked code counts"


def test_the_variables_speak_only_where_git_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(None) == git_state(tmp_path) == provenance.GitState("unknown", dirty=True)
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, COMMIT)
    with pytest.raises(UsageError, match=r"KDA_GIT_DIRTY: expected 0 or 1 .* got None"):
        git_state(tmp_path)
    monkeypatch.setenv(provenance.DIRTY_VARIABLE, "0")
    assert git_state(tmp_path) == provenance.GitState(COMMIT, dirty=False)
    (tmp_path / "file.py").write_text("")
    (tmp_path / ".git").mkdir()
    assert git_state(tmp_path) == provenance.GitState(COMMIT, dirty=False), "a .git that git knows nothing of"
    (tmp_path / ".git").rmdir()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "file.py").write_text("changed\n")
    state = git_state(tmp_path)
    assert state.commit != COMMIT
    assert state.dirty


@pytest.mark.parametrize(("commit", "dirty"), [("v1.0", "0"), (COMMIT[:12], "0"), (COMMIT, "no"), ("", "1")])
def test_wrong_variables_are_refused(commit: str, dirty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, commit)
    monkeypatch.setenv(provenance.DIRTY_VARIABLE, dirty)
    with pytest.raises(UsageError, match=r"KDA_GIT_(COMMIT|DIRTY): expected"):
        git_state(None)


def test_pins_name_release_and_wheel(task: Task) -> None:
    assert pins(task.config) == {"baseline": f"sglang 1.0 {WHEEL}"}
    found = provenance.collect(task, ["solution", "baseline"], driver=None)
    assert found.pins == pins(task.config)
    assert provenance.collect(task, ["solution"], driver=None).pins == {}


def test_versions_are_read_without_importing_anything_heavy() -> None:
    script = (
        "import sys; from kda_judge.evidence.provenance import versions; print(versions('580.1'));"
        "print([m for m in ('torch', 'triton', 'cutlass') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.stdout.splitlines()[1] == "[]"
    found = versions("580.1")
    assert set(found) == {
        "python", "kda-judge", "kda-runtime", "driver",
        "torch", "triton", "cuda", "cutlass-dsl", "tvm-ffi", "numpy", "nvcc",
    }  # fmt: skip
    assert found["driver"] == "580.1"
    assert versions(None)["driver"] == "absent"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", "absent"),
    ],
)
def test_cuda_version_is_read_as_text(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "torch")]})
    monkeypatch.setattr(provenance, "find_spec", lambda name: spec)
    assert provenance.versions(None)["cuda"] == expected


def test_run_ids_sort_by_time_and_differ() -> None:
    moment = datetime(2026, 11, 20, 4, 30, tzinfo=timezone.utc)
    assert utc(moment) == "2026-11-20T04:30:00Z"
    assert utc(moment.astimezone(timezone(timedelta(hours=9)))) == utc(moment)
    assert re.fullmatch(r"20261120T043000Z-[0-9a-f]{6}", run_id(moment))
    assert run_id(moment) < run_id(moment + timedelta(seconds=1))
    assert len({run_id(moment) for _ in range(50)}) > 45


def test_the_host_is_described() -> None:
    machine = provenance.host()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.pinned_core is None
