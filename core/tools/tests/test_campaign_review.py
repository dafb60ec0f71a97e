"""Review and promotion: what a program sees, what blocks, and that nothing is recorded that was not verified afresh."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.judge.tests.records_factory import make_checkout, make_record
from core.tools.tests.campaign_toy import HYPOTHESIS, campaign, git, speed
from core.tools.tests.conftest import Kda
from core.tools.tests.test_grid_records import a_run
from kda_judge.contract.errors import ArmFailed, ExitCode, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import append_only
from kda_judge.evidence.run_record import Verdict
from kda_tools.campaign import agents, confine, iterate, launch, promote, review, review_checks
from kda_tools.campaign.events import Decision, Done, RowOutcome
from kda_tools.campaign.history import recorded
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.promote_run import Given

__all__ = ["campaign"]
NAMED = """\
import threading
import torch
from functools import lru_cache
SEEN = {}
TABLE = {"a": 1}
def f(x, known=[]):
    global SEEN
    SEEN[x.data_ptr()] = x
    with torch.cuda.stream(None):
        return x
def g(x):
    return x.shape[0] == 4096 or x.shape[1] == 64 or "small-4x8" in x
"""


def seen(text: str, task: Task) -> set[tuple[str, int]]:
    (task.path / "solution" / "__init__.py").write_text(text)
    found = review_checks.solution_findings(task, None)
    return {(one.check, int(one.where.split(":")[1])) for one in found if one.check != "imports"}


def test_looking_at_callers_is_seen_and_stacking_tensors_is_not(task: Task) -> None:
    assert seen("import torch\n\n\ndef f(x):\n    return torch.stack((x, x))\n", task) == set()
    assert seen("from inspect import stack\n", task) == {("benchmark", 1)}
    assert seen("import sys\n\nsys._getframe(1)\n", task) == {("benchmark", 3)}


def test_what_a_program_sees(task: Task) -> None:
    rows = task.path / "bench" / "workloads.toml"
    rows.write_text(rows.read_text().replace("[4, 8]", "[4096, 64]"))
    found = seen(NAMED, task)
    assert found == {
        ("threads", 1),
        ("state", 3),  # lru_cache
        ("state", 4),  # SEEN is written to; TABLE is not
        ("state", 6),  # known=[]
        ("state", 7),  # global
        ("streams", 9),
        ("rows", 12),  # 4096 and the row's id; 64 is any kernel's block
    }
    assert seen("def fake(x):\n    return x + 1\n", task) == set()


def test_imports_are_seen(task: Task) -> None:
    (task.path / "solution" / "__init__.py").write_text("import requests\n")
    (one,) = review_checks.solution_findings(task, None)
    assert (one.check, one.where) == ("imports", "solution/__init__.py:1")


def test_evidence_is_looked_at(task: Task) -> None:
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('title = "A', 'numerics = "exact"\ntitle = "A'))
    row = RowOutcome(id="small-4x8", verdict=Verdict.CORRECT, reason="", used=0.93, ulps={"baseline": 1})
    done = Done(
        iteration=3,
        attempt=1,
        decision=Decision.KEEP,
        reason="",
        run_id=None,
        gpu="NVIDIA H200",
        seconds=1.0,
        rows=(row,),
        losses=("large-512x8",),
    )
    found = [(one.check, one.text) for one in review_checks.solution_findings(Task(task.path), done)]
    assert [check for check, _ in found] == ["tolerance", "numerics", "rows"]
    assert found[0][1].startswith("uses 93% of its tolerance")
    assert "1 ulp from upstream's bits" in found[1][1]


def keep(campaign: Campaign, more: str = "") -> None:
    speed(campaign, 1.1)
    path = campaign.task.path / "solution" / "__init__.py"
    path.write_text(path.read_text() + more)
    assert iterate.iterate(campaign, HYPOTHESIS).decision is Decision.KEEP


def test_findings_block_until_answered(campaign: Campaign) -> None:
    with pytest.raises(UsageError, match="nothing to promote: no iteration was kept"):
        promote.promote(campaign)
    keep(campaign, "\nimport threading\n")
    with pytest.raises(UsageError, match="nobody has reviewed the best version"):
        promote.promote(campaign)
    review.record(campaign, "Ada", [("person", "solution/", "why is 1.1 explained by nothing?")])
    with pytest.raises(UsageError, match="findings are not answered") as told:
        promote.promote(campaign)
    assert "threads: solution/__init__.py:" in str(told.value)
    assert "person: solution/: why is 1.1" in str(told.value)
    numbers = list(campaign.state().findings)
    assert numbers == [1, 2], "the program's findings are recorded once, however often it looks"
    with pytest.raises(UsageError, match="finding 7: no such finding"):
        review.answer(campaign, 7, "agent", "it is harmless because")
    with pytest.raises(UsageError, match="expected an answer that says why"):
        review.answer(campaign, 1, "agent", "no")
    for number in numbers:
        review.answer(campaign, number, "agent", "the import is removed in the next version")
    assert campaign.state().unanswered == []
    speed(campaign, 1.3)  # a new best version needs a review of its own
    assert iterate.iterate(campaign, "wider").decision is Decision.KEEP
    assert (campaign.state().findings, campaign.state().reviews) == ({}, [])


def test_an_agent_reviews_in_a_checkout_of_its_own(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(campaign)
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, re, sys, pathlib\n"
        "text = sys.stdin.read()\n"
        "assert '# speed: 1.1' in text, text\n"
        "assert 'kept from one call' in text, text\n"
        "assert '# speed: 1.1' in pathlib.Path('solution/__init__.py').read_text()\n"
        "out = re.search(r'Write what you find to (\\S+),', text)[1]\n"
        "line = json.dumps({'where': 'solution/__init__.py:3', 'text': 'keeps a buffer'})\n"
        "pathlib.Path(out).write_text(line if len(sys.argv) < 2 else sys.argv[1])\n"
    )
    with pytest.raises(UsageError, match="--agent command: KDA_NO_CLAUDE is set, so that no agent is started"):
        review.by_agent(campaign, "command", f"{sys.executable} {agent}")
    monkeypatch.delenv("KDA_NO_CLAUDE")
    (found,) = review.by_agent(campaign, "command", f"{sys.executable} {agent}")
    assert (found.by, found.where, found.text) == ("command", "solution/__init__.py:3", "keeps a buffer")
    before = campaign.journal.content()
    with pytest.raises(ArmFailed, match="no review was made: it ended with 4"):
        review.by_agent(campaign, "command", "exit 4")
    with pytest.raises(ArmFailed, match=r"no review was made: it wrote no findings.jsonl"):
        review.by_agent(campaign, "command", "true")
    with pytest.raises(UsageError, match=r"findings.jsonl:1: expected a JSON object"):
        review.by_agent(campaign, "command", f"{sys.executable} {agent} nonsense")
    assert campaign.journal.content() == before
    assert git(campaign.repository.root, "worktree", "list").count("\n") == 2, "no checkout is left behind"


def test_a_reviewing_agent_is_confined_and_has_its_environment(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(campaign)
    monkeypatch.delenv("KDA_NO_CLAUDE")
    own = tmp_path / "agents.toml"
    write = 'test "$MINE" = yes && test -d "$TMPDIR" && touch "$(dirname "$KDA_PROMPT")/findings.jsonl"'
    own.write_text(f"[agents.mine]\ncommand = ['bash', '-c', '{write}']\nenvironment = {{MINE = 'yes'}}\n")
    monkeypatch.setenv(agents.VARIABLE, str(own))
    monkeypatch.setattr(confine, "can_confine", lambda: True)
    seen: list[list[Path]] = []

    def confined(start: Path, write_to: list[Path], command: list[str], write_if_there: tuple[str, ...]) -> list[str]:
        assert start.name == "k90_axpy"
        seen.append(write_to)
        return command

    monkeypatch.setattr(confine, "confined", confined)
    assert review.by_agent(campaign, "mine", None) == []
    ((findings, scratch),) = seen
    assert scratch == confine.scratch(campaign)
    assert not campaign.repository.root.is_relative_to(findings)


def test_one_command_at_a_time_writes_to_a_campaign(campaign: Campaign, kda: Kda) -> None:
    keep(campaign)
    before = campaign.journal.content()
    for words in (["review", "--person", "Ada"], ["answer", "1", "it is harmless because"], ["promote"]):
        with campaign.alone():
            assert kda("campaign", *words).code == ExitCode.USAGE, words
    assert campaign.journal.content() == before


def test_without_a_gpu_all_is_verified_and_nothing_recorded(campaign: Campaign) -> None:
    """The real judge, in a new process, in a clean checkout, with fresh seeds."""
    keep(campaign)
    (campaign.task.path / "solution" / "__init__.py").write_text(
        "raise SystemExit('the worktree is not what is promoted')\n"
    )
    review.record(campaign, "Ada", [])
    before = campaign.journal.content()
    with pytest.raises(MissingRequirement, match=r"2 frozen rows with fresh seeds and 2 rows of the grid agree"):
        promote.promote(campaign)
    kinds = [entry.event.kind for entry in campaign.journal.read()][len(before.splitlines()) :]
    assert kinds == ["reviewed"], "the program's look alone"
    assert not campaign.task.ledger.exists()


def test_what_is_wrong_with_fresh_seeds_is_not_promoted(campaign: Campaign) -> None:
    """A kernel that the stand-in for the judge had kept, and that the real one finds out."""
    keep(campaign, "\n_axpy = axpy\n\n\ndef axpy(x, y, *, factor):\n    return _axpy(x, y, factor=factor) + 1\n")
    before = campaign.repository.commit_of("HEAD")
    review.record(campaign, "Ada", [])
    review.check(campaign)
    for number in campaign.state().findings:
        review.answer(campaign, number, "agent", "it is harmless, I promise")
    refused = promote.promote(campaign)
    assert refused.run_id is None
    assert refused.reason.startswith("refused: fresh seeds: out-64x16: INCORRECT")
    assert campaign.state().promoted == [refused]
    assert refused.run is not None
    assert refused.run.rows[0].verdict is Verdict.INCORRECT
    assert campaign.state().ended is None
    assert campaign.repository.commit_of("HEAD") == before


def test_a_refused_promotion_is_in_the_record_alone(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep(campaign)
    review.record(campaign, "Ada", [])
    before = git(campaign.repository.root, "for-each-ref")
    other = make_checkout(tmp_path / "other")
    run, grid = make_record(other), a_run(other, 5, (0, 9))
    given = Given(failure="the run: too slow", verified_rows=2, grid_rows=2, run=run, grid=grid)
    monkeypatch.setattr(promote, "_in_a_new_process", lambda *_: given)
    assert promote.promote(campaign).reason == "refused: the run: too slow"
    (kept,) = recorded(campaign.task)[0].promoted
    assert (kept.run, kept.grid) == (run, grid)
    assert git(campaign.repository.root, "for-each-ref") == before
    changed = git(campaign.repository.root, "status", "--porcelain", "--untracked-files=all").splitlines()
    assert changed == [f" M {campaign.copy}"]


@pytest.mark.parametrize("committed", [False, True])
def test_lines_that_nobody_measured_are_not_promoted(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    keep(campaign)
    review.record(campaign, "Ada", [])
    monkeypatch.setattr(promote, "_in_a_new_process", lambda *_: pytest.fail("it is refused before it is verified"))
    for name in ("ledger.jsonl", "grid.jsonl"):
        path = campaign.task.path / "docs" / name
        path.write_text('{"forged": 1}\n')
        if committed:
            git(campaign.repository.root, "add", "-A")
            git(campaign.repository.root, "commit", "-q", "-m", "mine")
        with pytest.raises(UsageError, match=rf"docs/{name}: expected as in the last iteration's commit, got other"):
            promote.promote(campaign)
        path.unlink()
    assert campaign.state().promoted == []


def outcome(row: str, best: float, candidate: float) -> RowOutcome:
    rng = np.random.default_rng(0)

    def times(level: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(level * np.exp(rng.normal(0, 1e-3, 4))) for _ in range(5))

    samples = {"best": times(best), "solution": times(candidate)}
    return RowOutcome(id=row, verdict=Verdict.FASTER, reason="", metric="device", samples=samples)


@pytest.mark.parametrize(
    ("large", "models", "reason"),
    [
        (7.0, ("a", "b"), "recorded"),
        (11.0, ("a", "b"), "recorded; wins 1 rows and loses 1"),
        (16.0, (), "recorded; wins 1 rows and loses 1; wins rows and no model"),
    ],
)
def test_a_promotion_says_what_it_wins_and_loses(
    tmp_path: Path, campaign: Campaign, large: float, models: tuple[str, ...], reason: str
) -> None:
    task = make_checkout(tmp_path / "other")
    path = task.path / "bench" / "workloads.toml"
    first, second = path.read_text().split("[[workload]]")[1:]
    named = [f'[[workload]]\nmodels = ["{name}"]{text}' for name, text in (('a", "b', first), ("a", second))]
    named = named if large != 16.0 else [text.replace('["a", "b"]', '["a"]') for text in named]
    path.write_text("".join(named))
    task = Task(task.path)
    before = (outcome("small-4x8", 10.0, 8.0), outcome("large-512x8", 10.0, large))
    run = make_record(task)
    given = Given(failure=None, verified_rows=2, grid_rows=9, run=run, before=before)
    found = promote.judged(task, campaign.state(), (1, 2, 3), given)
    assert (found.reason, found.run_id, found.wins) == (
        reason,
        run.run_id,
        ("small-4x8",) if large > 10 else ("small-4x8", "large-512x8"),
    )
    assert found.losses == (("large-512x8",) if large > 10 else ())
    assert set(found.models) == set(models)
    noisy = given.model_copy(update={"run": run.model_copy(update={"noisy": ("throttled",)})})
    assert (
        promote.judged(task, campaign.state(), (1,), noisy).reason
        == "refused: the run cannot be published: noisy: throttled"
    )


@pytest.mark.parametrize("lines", [2, 3, 4, 5, 99])
def test_a_recorded_promotion_ends_the_campaign_wherever_it_is_interrupted(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: int
) -> None:
    keep(campaign)
    review.record(campaign, "Ada", [])
    other = make_checkout(tmp_path.with_name(f"{tmp_path.name}-other"))
    run, grid = make_record(other), a_run(other, 5, (0, 9)).model_copy(update={"task": "axpy"})
    before = (outcome("out-64x16", 10.0, 9.0), outcome("inplace-64x16", 10.0, 9.0))
    given = Given(failure=None, verified_rows=2, grid_rows=2, run=run, grid=grid, before=before)
    monkeypatch.setattr(promote, "_in_a_new_process", lambda *_: given)
    monkeypatch.setattr(promote.report, "publishable", lambda *_: [])
    written = []

    def write(*words: Any) -> None:
        whole(*words)
        written.append(words)
        if len(written) == lines:
            raise KeyboardInterrupt

    whole = append_only.write
    monkeypatch.setattr(append_only, "write", write)
    with pytest.raises(KeyboardInterrupt) if lines < 99 else nullcontext():
        promote.promote(campaign)
    assert iterate.finish_interrupted(campaign) is None  # kda campaign resume
    best = campaign.repository.commit_of(campaign.best_branch)
    assert campaign.state().ended == f"promoted as run {run.run_id}"
    assert git(campaign.repository.root, "status", "--porcelain") == ""
    assert iterate.finish_interrupted(campaign) is None  # kda campaign resume
    assert campaign.repository.commit_of(campaign.best_branch) == campaign.repository.commit_of("HEAD") == best
    folder = f"{campaign.best_branch}:{campaign.folder}/docs"
    for name, one in (("ledger", run.run_id), ("grid", grid.run_id)):
        assert git(campaign.repository.root, "show", f"{folder}/{name}.jsonl").count(one) == 1
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    root = campaign.repository.common.parent
    with pytest.raises(UsageError, match="has ended: promoted as run"):
        launch.prepare(root, Task(root / campaign.folder), "h200", "command", "true")
