"""`kda new`: the copy is a task of its own at once, and bad names are refused."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_record
from core.tools.tests.every_task import every_task
from kda_judge.contract.errors import UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, find_task, find_tasks
from kda_tools.lab.inspect.aot import meta_tensors
from kda_tools.lab.tune import tuning_files
from kda_tools.lab.tune.tuning_files import has_sweeps
from kda_tools.project import check_tuning
from kda_tools.project.new_task import IGNORED, new_task
from kda_tools.project.validate import problems, remarks
from kda_tools.publish.generate import publish
from kda_tools.publish.report import publishable

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = ("tasks", "models", "shapes")
README = "# Test\n\n<!-- kda:results:begin -->\n<!-- kda:results:end -->\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one task, k03_qknorm_rope."""
    for name in (
        "noxfile.py",
        "constraints.txt",
        *(f"core/{one}/pyproject.toml" for one in ("runtime", "judge", "tools")),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "diffusion" / "k03_qknorm_rope", tmp_path / "diffusion" / "k03_qknorm_rope", ignore=IGNORED)
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    publish(find_tasks(), check=False)
    return tmp_path


@pytest.fixture
def source(checkout: Path) -> Task:
    return find_task("qknorm_rope")


def run(checkout: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": import_path(), "KDA_ROOT": str(checkout), "COLUMNS": "200", **more}
    return subprocess.run(
        [sys.executable, *command], cwd=checkout, env=env, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("my_rope", "diffusion/k04_my_rope"),
        ("k08_my_rope", "diffusion/k08_my_rope"),
        ("llm/my_rope", "llm/l01_my_rope"),
        ("llm/k07_my_rope", "llm/k07_my_rope"),
    ],
)
def test_the_copy_is_a_sound_task(checkout: Path, source: Task, name: str, folder: str) -> None:
    before = problems(source)  # here without its records
    assert new_task(source, name) == checkout / folder
    copy = find_task("my_rope")
    assert copy.path == checkout / folder
    assert copy.workloads == source.workloads
    assert copy.config.ops == source.config.ops
    assert problems(copy) == []
    assert problems(find_task("qknorm_rope")) == before
    assert not list(checkout.glob(".*"))


@every_task
def test_every_task_can_be_copied(
    task: Task, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As `kda validate --static` checks it, but for the tables in this process: a new one takes seconds to start."""
    pytest.importorskip("torch")
    shutil.copytree(task.path, tmp_path / task.family / task.folder, ignore=IGNORED, dirs_exist_ok=True)
    folder = new_task(find_task(task.op), "copies/k01_copy")
    made = [path for path in folder.rglob("*") if path.is_file()]  # before it is imported, which leaves bytecode
    monkeypatch.setattr(check_tuning, "problems", lambda copy: check_tuning.check(copy) if has_sweeps(copy) else [])
    copy = find_task("copy")
    assert problems(copy) == []
    notes = [(one / "docs" / "dispatch.md").read_text() for one in (task.path, folder)]
    if (task.path / "docs" / "tuning.md").exists():  # the copy has no such page: of the link its text is left
        assert "[tuning.md]" in notes[0]
        assert "tuning.md" in notes[1]
    assert "[tuning.md]" not in notes[1]
    # The words of its source are left in notes alone, and in the reasons of tuned lines that were not measured for it.
    for path in made:
        lines = [line for line in path.read_text().splitlines() if re.search(rf"\b{task.folder}\b", line)]
        said = ("> From ", "# From ", 'reason = "not measured: as in ')
        assert all(line.startswith(said) for line in lines), (path, lines)
    solution = copy.load("solution")
    row = copy.workloads[0]
    assert solution.launches(row.op, meta_tensors(row), row.scalars)


def test_everything_that_identifies_the_task_is_renamed(checkout: Path, source: Task) -> None:
    (source.path / "solution" / "extra.py").write_text(
        '"""From diffusion/k03_qknorm_rope, run by `kda bench qknorm_rope`, `kda\n'
        'tune qknorm_rope` and `nox -s bench-qknorm_rope`."""\n'
        'UPSTREAM = "sglang/jit_kernel/diffusion/qknorm_rope.py"\n'
    )
    (source.path / "docs" / "more.md").write_text(
        "nox -s tests -- diffusion/k03_qknorm_rope core/tools/tests -k 'qknorm_rope or take_a_kernel'\n"
    )
    folder = new_task(source, "llm/k02_other")
    assert (folder / "docs" / "more.md").read_text() == (
        "nox -s tests -- llm/k02_other core/tools/tests -k 'other or take_a_kernel'\n"
    )
    assert (folder / "solution" / "extra.py").read_text() == (
        '"""From llm/k02_other, run by `kda bench other`, `kda\n'
        'tune other` and `nox -s bench-other`."""\n'
        'UPSTREAM = "sglang/jit_kernel/diffusion/qknorm_rope.py"\n'
    )
    project = (folder / "pyproject.toml").read_text()
    assert 'name = "kda-other"' in project
    assert "qknorm" not in project.replace("Query/key RMSNorm", "")
    text = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    naming = {name for name in text if "k03_qknorm_rope" in text[name]}
    assert naming == {"prompt.md", "config.toml", "dispatch.md", "tuned.toml"}
    note = "From diffusion/k03_qknorm_rope, of which this task is a copy (`kda new`)"
    assert text["config.toml"].splitlines()[2].startswith(f"# {note}")
    for name, title in (("prompt.md", "# other: "), ("dispatch.md", "# Which call takes which path, and why")):
        first, empty, noted, *rest = text[name].splitlines()
        assert first.startswith(title)
        assert noted.startswith(f"> {note}")
        assert (empty, rest[rest.index("> Then remove this note.") + 1]) == ("", "")
        assert "k03_qknorm_rope" not in "\n".join(rest)


def test_while_its_note_stands_a_copy_is_not_on_the_map_nor_published(checkout: Path, source: Task) -> None:
    page = checkout / "diffusion" / "README.md"
    page.write_text("".join(f"<!-- kda:{name}:begin -->\n<!-- kda:{name}:end -->\n" for name in BLOCKS))
    publish(find_tasks(), check=False)
    before = page.read_text()
    folder = new_task(source, "other")
    copy = find_task("other")
    names = ["prompt.md", "config.toml", "docs/dispatch.md"]
    assert page.read_text() == before
    assert "k03_qknorm_rope" in before
    assert problems(copy) == []
    assert [line.partition(": ")[0] for line in remarks(copy)] == [str(folder / name) for name in names]
    record = make_record(copy)
    reason = "the task is a copy in part: `kda validate other` says what is left of its source"
    assert reason in publishable(copy, record)
    for name in names:
        path = folder / name
        path.write_text("".join(line for line in path.open() if "of which this task is a copy" not in line))
    assert remarks(copy) == []
    assert reason not in publishable(copy, record)
    publish(find_tasks(), check=False)
    assert "k04_other" in page.read_text()


def test_an_op_that_is_also_a_callable_keeps_the_callable(checkout: Path, source: Task) -> None:
    """As in k01_norm_infer, whose public callable has the op's name."""
    for path in source.path.rglob("*"):
        if path.is_file():
            text = path.read_text()
            path.write_text(re.sub(r"\bfused_inplace_qknorm_rope\b", "qknorm_rope", text))
    new_task(find_task("qknorm_rope"), "other")
    copy = find_task("other")
    assert list(copy.config.ops) == ["qknorm_rope"]
    assert {row.op for row in copy.workloads} == {"qknorm_rope"}


def test_results_and_caches_stay_behind(checkout: Path, source: Task) -> None:
    for name in ("docs/ledger.jsonl", "docs/wall.svg", "solution/__pycache__/a.pyc", ".cache/x", "solution/a.so"):
        path = source.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    folder = new_task(source, "other")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert not names & {"docs/ledger.jsonl", "docs/wall.svg", "solution/__pycache__", ".cache", "solution/a.so"}
    assert {"prompt.md", "config.toml", "solution", "bench/workloads.toml", "docs/results.md"} <= names


def test_a_copy_does_not_claim_its_sources_tuning(checkout: Path, source: Task) -> None:
    pytest.importorskip("torch")
    (source.path / "solution" / "tuned.toml").write_text(
        '[[rope]]\ncapability = 9\nconfig = {warps = 4}\ndevice = "NVIDIA H200"\ndate = "2026-11-20"\n'
        'reason = "9 rows, 40 candidates: 1.000 of each row\'s best"\n'
    )
    (source.path / "docs" / "tuning.jsonl").write_text("")
    folder = new_task(source, "other")
    tuned = (folder / "solution" / "tuned.toml").read_text()
    assert 'reason = "not measured: as in k03_qknorm_rope, of which this task is a copy"' in tuned
    assert "config = {warps = 4}" in tuned
    assert tuned.startswith("# Written by `kda tune other`;")
    assert not (folder / "docs" / "tuning.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("My-Op", "expected family/kNN_op, kNN_op or op in lower case letters, digits and _, got 'My-Op'"),
        ("a/b/c", "expected family/kNN_op"),
        ("../x", "expected family/kNN_op"),
        ("k3_op", "expected family/kNN_op"),
        ("", "expected family/kNN_op"),
        ("core/op", "'core' is no family of tasks"),
        ("k03_other", "number k03 is taken by diffusion/k03_qknorm_rope"),
        ("llm/qknorm_rope", "op 'qknorm_rope' is taken by diffusion/k03_qknorm_rope"),
    ],
)
def test_bad_names(checkout: Path, source: Task, name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        new_task(source, name)
    assert len(find_tasks()) == 1


def test_a_folder_that_exists_is_left_alone(checkout: Path, source: Task) -> None:
    note = checkout / "diffusion" / "k09_other" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    with pytest.raises(UsageError, match="diffusion/k09_other exists already"):
        new_task(source, "k09_other")
    assert note.read_text() == "mine"


def test_outside_a_checkout(source: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_ROOT")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "noxfile.py").unlink()
    with pytest.raises(UsageError, match="expected a checkout here"):
        new_task(source, "other")


def test_the_copy_is_listed_by_nox(checkout: Path, source: Task) -> None:
    pytest.importorskip("nox")
    new_task(source, "my_rope")
    listed = run(checkout, "-m", "nox", "-l").stdout
    for session in ("bench-my_rope", "validate-my_rope", "compile-my_rope", "bench-qknorm_rope"):
        assert f"- {session} -> " in listed


def test_the_copy_benches_beside_its_source(checkout: Path) -> None:
    """Through the command line, in processes of its own; both solutions load into one process without a collision."""
    pytest.importorskip("torch")
    made = run(checkout, "-m", "kda_tools", "new", "qknorm_rope", "my_rope")
    assert made.returncode == 0, made.stderr
    solutions = (
        "from kda_judge.contract.tasks import find_tasks; print([task.load('solution') for task in find_tasks()])"
    )
    both = run(checkout, "-c", solutions)
    assert both.returncode == 0, both.stderr
    bench = run(
        checkout, "-m", "kda_tools", "bench", "my_rope", "--rows", "qwen-19*", "--device", "cpu", "--generations", "1"
    )
    assert bench.returncode == 0, bench.stdout + bench.stderr
    assert "CORRECT" in bench.stdout


@pytest.fixture
def plain_copy(checkout: Path) -> Path:
    """`cp -r` of a task with records and a kernel for the interpreter, and another op in its contract."""
    source = checkout / "diffusion" / "k01_norm_infer"
    shutil.copytree(ROOT / "diffusion" / "k01_norm_infer", source, ignore=shutil.ignore_patterns("__pycache__"))
    folder = shutil.copytree(source, checkout / "diffusion" / "k08_other")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('op = "norm_infer"', 'op = "other"', 1))
    return folder


def test_a_plain_copy_of_a_folder_runs_itself(plain_copy: Path, checkout: Path) -> None:
    """Its tests, its tables and its oracle are the copy's: with a kernel that raises they fail."""
    tests = (
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *(str(plain_copy / "tests"), "-k", "one_pass or every_row"),
    )
    environment = {"TRITON_INTERPRET": "1"}
    assert run(checkout, *tests, **environment).returncode == 0
    copy = find_task("other")
    assert copy.load("solution").norm.__file__ == str(plain_copy / "solution" / "norm.py")
    assert {Path(one.table.path) for one in tuning_files.load(copy)} == {plain_copy / "solution" / "tuned.toml"}
    kernel = plain_copy / "solution" / "norm.py"
    kernel.write_text(kernel.read_text().replace("    follow_the_kernel_ahead(PDL)\n", "    tl.static_assert(False)\n"))
    broken = run(checkout, *tests, **environment)
    assert broken.returncode == 1
    assert "1 failed" in broken.stdout
    original = [*tests[:-3], str(checkout / "diffusion" / "k01_norm_infer" / "tests"), *tests[-2:]]
    assert run(checkout, *original, **environment).returncode == 0


def test_what_is_left_of_its_source_in_a_plain_copy_is_named(plain_copy: Path, checkout: Path) -> None:
    (checkout / "diffusion" / "README.md").write_text(
        "".join(f"<!-- kda:{name}:begin -->\n<!-- kda:{name}:end -->\n" for name in BLOCKS)
    )
    copy = find_task("other")
    lines = remarks(copy)
    for words in (
        f"{plain_copy / 'pyproject.toml'}: key 'project.name': expected 'kda-other', got 'kda-norm-infer'",
        f"{plain_copy / 'prompt.md'}:1: expected the title '# other: ...', got ",
        f"{plain_copy / 'docs' / 'ledger.jsonl'}: holds records of norm_infer, not of other: delete it",
    ):
        assert any(words in line for line in lines), words
    publish(find_tasks(), check=False)
    assert publish(find_tasks(), check=True) == [], "the rest of the checkout is sound"
    assert "k08_other" not in (checkout / "diffusion" / "README.md").read_text() + (checkout / "README.md").read_text()
    assert "k01_norm_infer" in (checkout / "diffusion" / "README.md").read_text()
    assert all("other" not in line for line in problems(find_task("norm_infer")))


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError])
def test_a_copy_that_broke_off_is_taken_away(
    source: Task, checkout: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr("kda_tools.project.new_task.publish", stop)
    with pytest.raises(end):
        new_task(source, "other")
    assert not list(checkout.glob("*/*_other"))
