"""The note of a copy and the links of a task's own documents."""

from pathlib import Path

import pytest

from core.tools.tests.every_task import every_task
from kda_judge.contract.tasks import Task, checkout_root, find_tasks
from kda_tools.project.new_task import NOTES
from kda_tools.project.validate import problems
from kda_tools.publish import task_notes
from kda_tools.publish.task_notes import COPIED, copied, dead_links, quoted, unlink, unrecorded


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "docs").mkdir()
    (tmp_path / "prompt.md").write_text("# op: title\n")
    return Task(tmp_path)


@every_task
def test_documents_of_every_task(task):
    assert copied(task) == []
    assert dead_links(task) == []
    assert unrecorded(task) == []


def test_notes_are_looked_for_where_they_are_put():
    assert set(task_notes.NOTED) == set(NOTES)


def test_links(task: Task) -> None:
    (task.path / "docs" / "dispatch.md").write_text(
        "[card](../prompt.md) and [there](../prompt.md#the-maths), [web](https://x.y/z), [here](#below)\n"
        "\n    [code](none.md)\n```\n[code](none.md)\n```\n`[code](none.md)`\n"
        "[gone](../solution/gone.py#top) and ![plot](plots/gone.svg)\n"
    )
    path = task.path / "docs" / "dispatch.md"
    assert dead_links(task) == [
        f"{path}:8: link to ../solution/gone.py: no such file",
        f"{path}:8: link to plots/gone.svg: no such file",
    ]


def test_a_folder_outside_of_a_checkout_keeps_its_links_into_one(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of one such a link has to lead somewhere."""
    path = task.path / "docs" / "dispatch.md"
    path.write_text("[paths](../../../docs/call_paths.md)\n")
    monkeypatch.delenv("KDA_ROOT", raising=False)
    monkeypatch.chdir(task.path)
    assert dead_links(task) == []
    monkeypatch.setattr(task_notes, "checkout_root", lambda: task.path.parents[1])
    assert dead_links(task) == [f"{path}:1: link to ../../../docs/call_paths.md: no such file"]


def test_dead_links_leave_their_text_and_code_stays(task: Task) -> None:
    (task.path / "docs" / "notes.md").write_text(
        "[card](../prompt.md) [`a` and b](gone.md) `[c](gone.md)` [d](gone.md#e)\n```\n[f](gone.md)\n```\n"
    )
    unlink(task)
    assert (task.path / "docs" / "notes.md").read_text() == (
        "[card](../prompt.md) `a` and b `[c](gone.md)` d\n```\n[f](gone.md)\n```\n"
    )
    assert dead_links(task) == []


def test_validate_names_a_dead_link(toy) -> None:
    (toy.path / "prompt.md").write_text("[gone](gone.md)\n")
    assert f"{toy.path / 'prompt.md'}:1: link to gone.md: no such file" in problems(toy)


def test_quoted_runs_have_to_be_recorded(task: Task) -> None:
    run, sweep = "20261120T135435Z-b4c641", "2026-11-20T13:49:06Z"
    (task.path / "docs" / "ledger.jsonl").write_text(f'{{"run_id":"{run}"}}\n')
    path = task.path / "docs" / "dispatch.md"
    path.write_text(f"# Notes\nThe run {run}, and\nthe sweep of {sweep}, and `20261120T135435Z-b4c642`.\n")
    says = "is quoted, and no line of docs/*.jsonl has it"
    assert unrecorded(task) == [f"{path}:3: {sweep} {says}", f"{path}:3: 20261120T135435Z-b4c642 {says}"]
    (task.path / "docs" / "tuning.jsonl").write_text(f'{{"utc":"{sweep}"}}\n')
    assert unrecorded(task) == [f"{path}:3: 20261120T135435Z-b4c642 {says}"]
    path.write_text(f"> from k01_op, {COPIED}\n" + path.read_text())
    assert unrecorded(task) == []


def test_quoted_times_have_to_be_medians_of_their_run(task: Task) -> None:
    """Also in a list, and where a line ends in between; rounded as they are quoted."""
    (source,) = (found for found in find_tasks() if found.op == "qknorm_rope")
    task.ledger.write_bytes(source.ledger.read_bytes())
    run = "20261120T205702Z-5cfb55"
    path = task.path / "docs" / "dispatch.md"
    path.write_text(f"# Notes\nUpstream takes 2.03 and\n2.06 us (run\n{run}), ours 2.3 us (run {run}).\n")
    assert unrecorded(task) == []
    path.write_text(f"# Notes\nUpstream takes 2.03 and\n0.01 us (run\n{run}), ours 2.3999 us (run {run}).\n")
    says = f"us is quoted, and no arm's median in run {run} is that"
    assert unrecorded(task) == [f"{path}:2: 0.01 {says}", f"{path}:4: 2.3999 {says}"]


def test_validate_names_an_unrecorded_run(toy) -> None:
    (toy.path / "prompt.md").write_text("The run 20261120T135435Z-b4c641.\n")
    said = f"{toy.path / 'prompt.md'}:1: 20261120T135435Z-b4c641 is quoted, and no line of docs/*.jsonl has it"
    assert said in problems(toy)


def test_runs_quoted_beside_the_tasks_are_recorded() -> None:
    root = checkout_root()
    assert root is not None
    logs = [*root.glob("docs/*.jsonl"), *(task.ledger for task in find_tasks())]
    records = "".join(path.read_text() for path in logs if path.is_file())
    paths = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("*/README.md")]
    names = [(path, number, name) for path in paths for number, name in quoted(path.read_text())]
    assert names
    assert [place for place in names if place[2] not in records] == []
