"""What a record says ran: commit, hashes, pins, versions."""

import hashlib
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import kda_core
from core.tests.records_factory import COMMIT, WHEEL, make_checkout
from kda_core import provenance
from kda_core.errors import UsageError
from kda_core.provenance import content_hash, git_state, hashes, pins, run_id, utc, versions
from kda_core.tasks import Task


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


OUTSIDE = {
    "__init__", "__main__", "aot", "cli", "doctor", "errors", "ledger", "migrations", "progress", "provenance",
    "records", "scaffold", "schema", "suggest", "tasks", "terminal", "toml", "validate", "view",
    "compare", "comparison_view", "rerun",
    "family", "grid", "plots", "publish", "report", "site", "tables",
    "documents", "kernels_view", "occupancy", "sass", "sources",
    "alone", "evidence", "jsonl", "profile", "sanitize", "tools", "tune",
}  # fmt: skip
"""Modules that find, show, store or compile, or choose what a solution then holds, and so cannot change a number."""
LIBRARY = {"calls", "cubin", "cute", "rows", "tuning"}
"""Modules that solutions import: part of the hash of those that do."""


def test_harness_names_each_module_that_can_change_a_number_once() -> None:
    folder = Path(kda_core.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert len(set(provenance.HARNESS)) == len(provenance.HARNESS)
    assert set(provenance.HARNESS) <= modules
    assert modules - set(provenance.HARNESS) <= OUTSIDE | LIBRARY, "a new module belongs into HARNESS or OUTSIDE"


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


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch\nfrom kda_core.launch import Plans\nfrom . import kda_core\n", []),
        ("from kda_core.tuning import Table\n", ["tuning"]),
        ("def f():\n    import kda_core.rows as r\n", ["rows"]),
        ("from kda_core import tuning, launch\nfrom kda_core.rows import form\n", ["rows", "tuning"]),
        # suggest imports nothing else of core; scaffold reaches it through tasks.
        ("import kda_core.suggest\n", ["suggest"]),
    ],
)
def test_the_library_is_what_the_solution_imports_of_core(task: Task, source: str, modules: list[str]) -> None:
    core = Path(kda_core.__file__).parent
    (task.path / "solution" / "inner").mkdir()
    (task.path / "solution" / "inner" / "kernel.py").write_text(source)
    assert provenance.library(task.path / "solution") == modules
    expected = content_hash(core, [f"{name}.py" for name in modules]) if modules else None
    assert hashes(task).get("library") == expected


def test_the_library_follows_imports_inside_core(task: Task) -> None:
    (task.path / "solution" / "__init__.py").write_text("import kda_core.scaffold\n")
    found = provenance.library(task.path / "solution")
    assert {"scaffold", "tasks", "suggest", "publish"} <= set(found)
    assert not {"errors", "toml", *provenance.HARNESS} & set(found)


@pytest.mark.parametrize("content", [b"import kda_core.rows\ndef (\n", b"\0", b"\xff"])
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
    assert content_hash(tmp_path, ["**/*"]) == before
    (tmp_path / ".hidden.json").write_bytes(b"{}")
    assert content_hash(tmp_path, ["**/*"]) != before, "a solution could read it"
    (tmp_path / ".hidden.json").unlink()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert content_hash(tmp_path, ["**/*"]) != before


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
    (tmp_path / "README.md").write_text("changed\n")
    assert not git_state(tmp_path).dirty, "ledgers and Markdown decide no number"
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
        "import sys; from kda_core.provenance import versions; print(versions('580.1'));"
        "print([m for m in ('torch', 'triton', 'cutlass') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(kda_core.__file__).parents[1])},
    )
    assert ran.stdout.splitlines()[1] == "[]"
    found = versions("580.1")
    assert set(found) == {
        "python", "kda-core", "driver", "torch", "triton", "cuda", "cutlass-dsl", "tvm-ffi", "numpy", "nvcc",
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
    machine = provenance.host(3)
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.pinned_core == 3
