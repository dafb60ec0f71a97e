"""A task to AKO4ALL's form and back: its benchmark runs by itself, its best version and its log come back."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.tools.tests.test_ako_clean import git
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_tools.campaign import launch
from kda_tools.campaign.ako_import import bring_back, iterations
from kda_tools.campaign.history import recorded
from kda_tools.campaign.prompt import _tried_before
from kda_tools.port.ako_export import export

LOG = """# Iteration Log

## Summary

| Iter | Title | Speedup | Runtime (ms) | Status |
|------|-------|---------|--------------|--------|
| 1 | wider tiles | 1.02x | 0.011 | improved |
| 2 | two stages | 1.31x | 0.009 | improved |
| 3 | no cache hint | 0.97 | 0.012 | regression |
| 4 | a typo | - | - | failed |

## Iterations

<!-- ### Iter N — Short title
- **Hypothesis:** the template
-->

### Iter 2 — two stages

- **Hypothesis:** loads of the next tile hide behind this one
- **Changes:** one more stage
- **Analysis:** as expected
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """k02 in a checkout of its own."""
    original = find_task("rotary_embedding").path
    root = tmp_path / "checkout"
    copy = root / "diffusion" / original.name
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl", "plots"))
    (root / "core").mkdir()
    (root / "core" / "README.md").touch()
    (root / "noxfile.py").touch()
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a checkout")
    monkeypatch.chdir(root)
    monkeypatch.delenv("KDA_ROOT", raising=False)
    return Task(copy)


@pytest.fixture
def ako(task: Task, tmp_path: Path) -> Path:
    """What is exported, in a repository like a checkout of AKO4ALL."""
    folder = tmp_path / "AKO4ALL"
    folder.mkdir()
    for name, text in (("TASK.md", "# Theirs"), ("HINTS.md", "# Hints"), ("ITERATIONS.md", "# Iteration Log\n")):
        (folder / name).write_text(text)
    export(task, folder)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "exported")
    return folder


def iterate(ako: Path, number: int, edit: str = "") -> None:
    """An iteration as AKO4ALL's agent leaves it: a change of the kernel, and a commit."""
    path = ako / "solution" / "kda_rotary_embedding" / "rotary.py"
    path.write_text(path.read_text() + (edit or f"# iteration {number}\n"))
    git(ako, "add", "-A")
    git(ako, "commit", "-qm", f"[iter {number}] a change")


def bench(ako: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(ako), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-s", "bench/bench_rotary_embedding.py"]
    return subprocess.run(command, cwd=ako, env=env, capture_output=True, text=True)


def test_the_benchmark_runs_by_itself_and_finds_a_wrong_kernel(ako: Path) -> None:
    assert (ako / "PROMPT.md").read_text().startswith("# Theirs\n\n---\n\n# Hints\n")
    assert "# rotary_embedding: " in (ako / "PROMPT.md").read_text()
    sources = [path.read_text() for path in ako.rglob("*.py")]
    assert not any(re.search(r"^\s*(from|import) kda_(runtime|judge|tools)", text, re.MULTILINE) for text in sources)
    done = bench(ako)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("CORRECT=True\n")
    assert "not timed without a GPU" in done.stdout
    assert "us" not in done.stdout.split(), "a time without a GPU"
    path = ako / "solution" / "rotary_embedding.py"
    path.write_text(path.read_text() + "_right = apply_ltx2_split_rotary_emb\n"
                    "apply_ltx2_split_rotary_emb = lambda x, cos, sin: _right(x, cos, -sin)\n")  # fmt: skip
    done = bench(ako)
    assert (done.returncode, done.stdout.endswith("CORRECT=False\n")) == (1, True), done.stderr
    assert "more than allowed" in done.stdout


def test_outputs_with_rules_are_compared_by_them(tmp_path: Path) -> None:
    """Float8 and its scales, in place: neighbouring numbers are as good, others are not."""
    export(find_task("per_token_group_quant"), tmp_path)
    command = [sys.executable, "-s", "bench/bench_per_token_group_quant.py"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    path = tmp_path / "solution" / "kda_per_token_group_quant" / "group_quant.py"
    for factor, right in (("1.0", True), ("1.01", True), ("1.4", False)):
        before = path.read_text()
        path.write_text(before.replace("(groups * (LARGEST", f"(groups * {factor} * (LARGEST"))
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        path.write_text(before)
        assert (done.returncode == 0) == right, done.stdout + done.stderr
        assert right or "output_q: off by up to" in done.stdout


def test_the_best_version_and_the_log_come_back(task: Task, ako: Path) -> None:
    assert "kda_runtime" not in (ako / "solution" / "kda_rotary_embedding" / "rotary.py").read_text()
    before = (task.path / "solution" / "rotary.py").read_text()
    for number in (1, 2, 3):
        iterate(ako, number)
    (ako / "ITERATIONS.md").write_text(LOG)
    made = bring_back(task, ako)
    assert [one.iteration for one in made if one.taken] == [2]
    assert (task.path / "solution" / "rotary.py").read_text() == before + "# iteration 1\n# iteration 2\n"
    changed = git(task.path, "diff", "--name-only").splitlines()
    assert [Path(name).name for name in changed] == ["rotary.py"], "imports are as they were"
    (state,) = recorded(task)
    assert state.claimed == made
    assert state.launched.base == git(task.path, "rev-parse", "HEAD").strip()
    assert [(one.iteration, one.speedup, one.status) for one in made] == [
        (1, 1.02, "improved"),
        (2, 1.31, "improved"),
        (3, 0.97, "regression"),
        (4, None, "failed"),
    ]
    assert made[1].hypothesis == "loads of the next tile hide behind this one"
    assert made[1].commit == git(ako, "log", "--format=%H", "--grep", "iter 2").strip()
    assert "+# iteration 2" in made[1].patch
    assert (made[3].commit, made[3].patch) == (None, ""), "it was never committed"
    assert not state.finished_iterations, "a claim is no decision"
    assert "this one: improved, 1.31 times as fast as its agent says; not measured here" in _tried_before(task)
    with pytest.raises(UsageError, match="changed since it was exported"):
        bring_back(task, ako)


def test_in_a_campaigns_worktree_the_claims_join_its_record(task: Task, ako: Path, monkeypatch) -> None:
    iterate(ako, 2)
    (ako / "ITERATIONS.md").write_text("| 2 | two stages | 1.31x | 0.009 | improved |\n")
    monkeypatch.setenv("KDA_WORKTREES", str(ako.parent / "trees"))
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    campaign = launch.prepare(task.path.parents[1], task, "h200", "command", "true").campaign
    clean = git(campaign.repository.root, "status", "--porcelain")
    monkeypatch.chdir(campaign.repository.root)
    with campaign.alone(), pytest.raises(UsageError, match="another command writes to it"):
        bring_back(campaign.task, ako)
    assert git(campaign.repository.root, "status", "--porcelain") == clean
    bring_back(campaign.task, ako)
    state = campaign.state()
    assert [(one.iteration, one.taken) for one in state.claimed] == [(2, True)]
    assert not campaign.edited(state), "the committed copy has them as well"
    (copied,) = recorded(campaign.task)
    assert copied.entries == state.entries


def test_a_file_that_is_no_text_is_named_and_another_iterations_is_shown(task: Task, ako: Path) -> None:
    path = ako / "solution" / "kda_rotary_embedding" / "rotary.py"
    good = path.read_bytes()
    path.write_bytes(good + b"# \xff\n")
    git(ako, "commit", "-qam", "[iter 1] bytes")
    (ako / "ITERATIONS.md").write_text(LOG.replace("| 2 |", "| 5 |").replace("Iter 2", "Iter 5"))
    git(ako, "commit", "-q", "--allow-empty", "-m", "[iter 5] the same bytes")
    with pytest.raises(UsageError, match=r"kda_rotary_embedding/rotary.py at \w+: expected text in UTF-8"):
        bring_back(task, ako)
    assert git(task.path, "status", "--porcelain") == ""
    path.write_bytes(good)
    iterate(ako, 5)
    made = bring_back(task, ako)
    assert (made[0].iteration, made[0].taken) == (1, False)
    assert "+# \N{REPLACEMENT CHARACTER}" in made[0].patch


def test_rules_that_are_none_are_said_before_anything_is_written(task: Task, ako: Path) -> None:
    iterate(ako, 2)
    (ako / "ITERATIONS.md").write_text(LOG)
    (task.path / "campaign.toml").write_text("trys = 3\n")
    before = git(task.path, "status", "--porcelain")
    with pytest.raises(UsageError, match="unknown key 'trys'"):
        bring_back(task, ako)
    assert git(task.path, "status", "--porcelain") == before


def test_where_none_improved_the_solution_stays(task: Task, ako: Path) -> None:
    (ako / "ITERATIONS.md").write_text("| 1 | a try | 0.9 | 0.1 | regression |\n")
    assert [one.taken for one in bring_back(task, ako)] == [False]
    assert git(task.path, "status", "--porcelain", "--", "solution") == ""
    assert [len(state.claimed) for state in recorded(task)] == [1]
    bring_back(task, ako)
    assert [len(state.claimed) for state in recorded(task)] == [1, 1], "each import is a campaign of its own"


def shared_code(_task: Task, ako: Path) -> None:
    path = ako / "solution" / "kda_rotary_embedding" / "_kda" / "op.py"
    path.write_text(path.read_text() + "# faster\n")
    iterate(ako, 2)


def no_commit(_task: Task, ako: Path) -> None:
    iterate(ako, 1)


def no_package(_task: Task, ako: Path) -> None:
    shutil.rmtree(ako / "solution" / "kda_rotary_embedding")
    git(ako, "add", "-A")
    git(ako, "commit", "-qm", "[iter 2] a file instead")


def another_task(_task: Task, ako: Path) -> None:
    mark = ako / ".kda-ako.json"
    mark.write_text(mark.read_text().replace("k02_rotary_embedding", "k09_other"))


def no_mark(_task: Task, ako: Path) -> None:
    (ako / ".kda-ako.json").unlink()


def dirty_solution(task: Task, ako: Path) -> None:
    iterate(ako, 2)
    (task.path / "solution" / "mine.txt").write_text("x")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shared_code, "shared code was changed"),
        (no_commit, "expected a commit '[iter 2] ...'"),
        (no_package, "not there at"),
        (another_task, "an export of k09_other, expected k02_rotary_embedding"),
        (no_mark, "expected what `kda campaign ako export` wrote"),
        (dirty_solution, "changed since it was exported"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_brought_back(task: Task, ako: Path, spoil, words: str) -> None:
    spoil(task, ako)
    (ako / "ITERATIONS.md").write_text(LOG)
    before = {path: path.read_bytes() for path in task.path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as refused:
        bring_back(task, ako)
    assert words in str(refused.value)
    assert {path: path.read_bytes() for path in task.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("| 1 | a | fast | 1 | improved |\n", "iteration 1, Speedup: expected a number or -, got 'fast'"),
        ("| 1 | a | inf | 1 | improved |\n", "iteration 1, Speedup: expected a number or -, got 'inf'"),
        ("| 1 | a | 1 | nan | improved |\n", "iteration 1, Runtime (ms): expected a number or -, got 'nan'"),
        ("| 0 | a | 1 | 1 | improved |\n", "iteration 0: expected numbers from 1 on in the table"),
        ("| 1 | a | 1 | 1 | improved |\n| 1 | b | 1 | 1 | improved |\n", "iteration 1 has two rows"),
        ("### Iter 7 — lost\n", "iteration 7 has a section and no row"),
    ],
)
def test_a_log_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        iterations(text, Path("ITERATIONS.md"))
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["", "null", "{}", '{"task"'])
def test_a_mark_that_is_none_is_named(task: Task, ako: Path, text: str) -> None:
    (ako / ".kda-ako.json").write_text(text)
    (ako / "ITERATIONS.md").write_text(LOG)
    with pytest.raises(UsageError, match=r"/\.kda-ako\.json: "):
        bring_back(task, ako)


def test_an_export_that_could_not_come_back_is_refused(task: Task, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a new or empty folder, or a checkout of AKO4ALL"):
        export(task, task.path)
    shutil.rmtree(tmp_path / "checkout" / ".git")
    with pytest.raises(UsageError, match="expected a git checkout with a commit"):
        export(task, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_export_writes_over_nothing(task: Task, ako: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        export(task, ako)
