"""Changes that were measured and not adopted: `kda bench --tried`, the record with its patch, and the page."""

import shutil
import subprocess
from pathlib import Path

import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from core.tools.tests.conftest import Kda
from kda_judge.contract.errors import ExitCode, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger, record_log
from kda_judge.evidence.run_record import RunRecord
from kda_tools.lab.tried_record import TriedRecord, log, patch_of
from kda_tools.project.validate import problems
from kda_tools.publish.generate import publish
from kda_tools.publish.tried_page import digest_md
from kda_tools.publish.why import why

CHANGE = "Two warps instead of one."


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_checkout(tmp_path / "checkout")


@pytest.fixture
def changed(task: Task, tmp_path: Path) -> Path:
    """A copy of the solution with a line changed, a line after it, and a file more."""
    folder = tmp_path / "two_warps"
    shutil.copytree(task.path / "solution", folder)
    (folder / "__init__.py").write_text("def fake(x):\n    return 1 * x\n")
    (folder / "warps.py").write_text("WARPS = 2")
    return folder


def run_of(task: Task) -> RunRecord:
    """A run of the change beside the solution; its numbers are those of a run of the solution beside a baseline."""
    text = make_record(task).model_dump_json().replace("solution", "two_warps").replace("baseline", "solution")
    return RunRecord.model_validate_json(text)


def record_of(task: Task, changed: Path, run: RunRecord) -> TriedRecord:
    return TriedRecord(task=task.op, name="two_warps", change=CHANGE, patch=patch_of(task, changed), run=run)


def test_the_patch_makes_the_change_again(task: Task, changed: Path) -> None:
    root = task.path.parents[1]
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "apply"], cwd=root, input=patch_of(task, changed), text=True, check=True)
    for path in changed.rglob("*.*"):
        assert (task.path / "solution" / path.relative_to(changed)).read_text().strip() == path.read_text().strip()


def test_an_unchanged_copy_is_refused(task: Task, tmp_path: Path) -> None:
    shutil.copytree(task.path / "solution", tmp_path / "same")
    with pytest.raises(UsageError, match=r"same: expected a changed copy of .*solution, got the same files"):
        patch_of(task, tmp_path / "same")


def test_page_and_why_have_the_number_and_the_run(task: Task, changed: Path) -> None:
    assert digest_md(task) is None
    run = run_of(task)
    record_log.append(log(task), record_of(task, changed, run))
    ledger.append(task.ledger, make_record(task))
    first, second = (row.speedup["device"]["solution"] for row in run.rows)
    shown = f"{first.estimate:.3f} [{first.low:.3f}, {first.high:.3f}]"
    page = digest_md(task) or ""
    assert f"| `small-4x8` {shown}, `large-512x8` {second.estimate:.3f} " in page
    assert f"| NVIDIA H200, 2026-11-20, `{run.run_id}` |" in page
    assert "+WARPS = 2\n" in (digest_md(task, whole=True) or "")
    none = record_of(task, changed, run.model_copy(update={"rows": (), "headline": None}))
    record_log.append(log(task), none.model_copy(update={"change": "a | b"}))
    page = digest_md(task) or ""
    assert "| a \\| b | - | - | NVIDIA H200, " in page, "an interrupted run may have no row"
    publish([task], check=False, draw=False, shared=False)
    assert (task.path / "docs" / "tried.md").read_text() == page
    words = " ".join(why(task, "small-4x8").split())
    assert f"Two warps instead of one: {shown} of the solution's speed (run {run.run_id})" in words


def test_a_number_that_the_samples_do_not_give_is_found(task: Task, changed: Path) -> None:
    record_log.append(log(task), record_of(task, changed, run_of(task)))
    assert not [line for line in problems(task) if "tried.jsonl" in line]
    text = log(task).read_text()
    estimate = TriedRecord.model_validate_json(text).run.rows[0].speedup["device"]["solution"].estimate
    log(task).write_text(text.replace(f'"estimate":{estimate}', '"estimate":9.5'))
    assert any("tried.jsonl:1: " in line for line in problems(task))


def test_what_is_no_such_run_is_refused(checkout: Path, kda: Kda, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(checkout / "toys" / "k90_axpy" / "solution", copy)
    (copy / "more.py").write_text("MORE = 1\n")
    whole = ("--port", f"mine={copy}", "--arm", "mine", "--against", "solution", "--tried", CHANGE)
    for arguments in (whole[2:], (*whole[:2], *whole[4:]), (*whole[:4], *whole[6:]), (*whole, "--quick")):
        refused = kda("bench", "axpy", *arguments)
        assert refused.code == ExitCode.USAGE, arguments
        assert "--tried: expected a sentence, --port NAME=DIR, --arm NAME and --against solution" in refused.err
    refused = kda("bench", "axpy", *whole, "--device", "cpu")
    assert "--tried: needs a GPU; a run without one measures nothing" in refused.err
    assert not (checkout / "toys" / "k90_axpy" / "docs" / "tried.jsonl").exists()
