"""One iteration: what it refuses, what it keeps and reverts, what it leaves in git, and that no record is ever lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from core.tools.tests.campaign_toy import HYPOTHESIS, campaign, git, judge, launched, speed
from kda_judge.contract.errors import ArmFailed, LedgerError, MissingRequirement, UsageError
from kda_tools.campaign import allowed, due, iterate, measure, place
from kda_tools.campaign.events import Begun, Decision, Done
from kda_tools.campaign.history import recorded, row_history
from kda_tools.campaign.journal import entries
from kda_tools.campaign.place import Campaign
from kda_tools.publish import tuning_page

__all__ = ["campaign"]
STEPS = ("candidate", "begun", "measured", "done", "restored", "committed")


def run(campaign: Campaign, value: float, message: str = HYPOTHESIS, **more: object) -> Done:
    speed(campaign, value)
    return iterate.iterate(campaign, message, **more)


def solution(campaign: Campaign) -> str:
    return (campaign.task.path / "solution" / "__init__.py").read_text()


def best_solution(campaign: Campaign) -> str:
    return git(campaign.repository.root, "show", f"{campaign.best_branch}:{campaign.folder}/solution/__init__.py")


def test_a_gain_is_kept_and_a_loss_is_reverted(campaign: Campaign) -> None:
    kept = run(campaign, 1.05)
    assert (kept.decision, kept.iteration) == (Decision.KEEP, 1), kept.reason
    assert kept.test is not None
    assert 1 < kept.test.low < kept.test.gain.estimate == pytest.approx(1.05, rel=0.01)
    assert set(kept.wins) == {"out-64x16", "inplace-64x16"}
    assert kept.against_baseline is not None
    assert kept.against_baseline.estimate == pytest.approx(2.1, rel=0.01)
    assert "# speed: 1.05" in best_solution(campaign)

    notes = campaign.task.path / "docs" / "dispatch.md"
    notes.write_text("# Which call takes which path, and why\n\nIn vain: 1.01.\n")
    lost = run(campaign, 1.01, "two rows a block: fewer blocks")
    assert lost.decision is Decision.REVERT
    assert "# speed: 1.05" in solution(campaign), "the files are the best's again"
    assert "In vain: 1.01." in notes.read_text(), "what was tried stays"
    root = campaign.repository.root
    assert git(root, "status", "--porcelain") == ""
    subjects = git(root, "log", "--format=%s", f"main..{campaign.branch}").splitlines()
    assert subjects == ["[iter 2] two rows a block: fewer blocks", f"[iter 1] {HYPOTHESIS}"]
    assert git(root, "rev-parse", campaign.best_branch) == git(root, "rev-parse", f"{campaign.branch}~1")
    assert "# speed: 1.01" in git(root, "show", f"{campaign.ref(2)}:{campaign.folder}/solution/__init__.py")
    assert "+# speed: 1.01" in campaign.state().begun[2].change.patch
    committed = git(root, "show", f"{campaign.branch}:{campaign.copy}")
    assert committed.encode() == campaign.journal.content()
    assert [one.event.kind for one in entries(committed.encode(), "")] == ["launched", "begun", "done", "begun", "done"]


def test_a_row_that_loses_is_not_paid_for_by_others(campaign: Campaign) -> None:
    speed(campaign, 1.3, rows="out-64x16")
    done = iterate.iterate(campaign, HYPOTHESIS)
    assert done.decision is Decision.KEEP, "still faster than the best on that row"
    speed(campaign, 1.35, rows="inplace-64x16")
    done = iterate.iterate(campaign, "the other layout: wider stores", rows=("out-*",))
    assert (done.decision, done.losses) == (Decision.REVERT, ("inplace-64x16",))
    assert done.test is not None
    assert done.test.rows == ("out-64x16",)
    assert done.test.low > 1
    assert row_history(campaign.task, "out-64x16")[0][1].startswith("revert: gain 1.03")
    assert row_history(campaign.task, "inplace-64x16") == []


@pytest.mark.parametrize("verdict", ["INCORRECT", "INVALID", "ERROR", "TIMEOUT"])
def test_failures_are_iterations(campaign: Campaign, verdict: str) -> None:
    speed(campaign, 2.0, verdict=verdict)
    done = iterate.iterate(campaign, HYPOTHESIS)
    assert done.decision is Decision.FAILED
    assert done.reason.startswith(f"out-64x16: {verdict}: as the test says")
    assert "speed" not in solution(campaign)
    assert campaign.state().tries == 1


def test_what_does_not_compile_is_an_iteration(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ArmFailed("kernel k: expected a constexpr")

    monkeypatch.setattr(iterate, "measure", breaks)
    assert run(campaign, 2.0).reason == "does not compile: kernel k: expected a constexpr"


def test_missing_upstream_files_are_not_the_candidates_fault(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise MissingRequirement("the wheel is not in the cache")

    speed(campaign, 1.1)
    killed_at("begun", lambda passed: iterate.iterate(campaign, HYPOTHESIS, passed=passed))
    with monkeypatch.context() as patched:
        patched.setattr(measure, "arm_spec", absent)
        with pytest.raises(MissingRequirement, match="not in the cache"):
            iterate.finish_interrupted(campaign)
        assert campaign.state().tries == 1
    iterate.finish_interrupted(campaign)
    speed(campaign, 1.3)
    monkeypatch.setattr(measure, "arm_spec", absent)
    with pytest.raises(MissingRequirement, match="not in the cache"):
        iterate.iterate(campaign, "wider")
    assert campaign.state().tries == 2
    assert "# speed: 1.3" in solution(campaign)


def test_rows_that_are_not_measured_do_not_decide(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(checkout, monkeypatch, 'rows = ["out-*"]\n')
    monkeypatch.setattr(iterate, "demand_idle_gpu", lambda: True)
    with pytest.raises(UsageError, match=r"--rows inplace-\*: expected a row that the campaign measures, got none"):
        run(made, 1.1, rows=("inplace-*",))
    assert made.state().tries == 0


def test_a_noisy_run_decides_nothing(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    quiet = judge()
    monkeypatch.setattr(iterate, "measure", lambda *given: replace(quiet(*given), noisy=("throttled",)))
    done = run(campaign, 1.5)
    assert done.decision is Decision.REVERT
    assert "noisy" in done.reason


# ---- the harness ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bench/workloads.toml", "changed; the card does not allow it"),
        ("config.toml", "changed; the card does not allow it"),
        ("baseline/__init__.py", "changed; the card does not allow it"),
        ("campaign.toml", "added; the card does not allow it"),
        ("docs/ledger.jsonl", "added; the card does not allow it"),
        ("tests/test_op.py", "changed; tests may only be added"),
        ("../../conftest.py", "added; it is outside of the task"),
        ("../../.gitignore", "changed; it is outside of the task"),
    ],
)
def test_a_changed_harness_is_refused_and_recorded(campaign: Campaign, name: str, why: str) -> None:
    path = campaign.task.path / name
    path.write_text("# mine\n")
    speed(campaign, 2.0)
    # Neither hides it: git's flag for files that are not to be looked at, nor its private list of ignored files.
    root = campaign.repository.root
    if why.startswith("changed"):
        git(root, "update-index", "--assume-unchanged", str(path))
    (campaign.repository.common / "info").mkdir(exist_ok=True)
    (campaign.repository.common / "info" / "exclude").write_text("*\n")
    with pytest.raises(UsageError, match=r"refused, and that is recorded"):
        iterate.iterate(campaign, HYPOTHESIS)
    state = campaign.state()
    assert (state.tries, len(state.refused)) == (0, 1)
    assert why in state.refused[0].reason


@pytest.mark.parametrize("name", ["helper.py", "kernels.cubin", "build/made.py", "__pycache__/made.py"])
def test_files_that_git_ignores_are_refused(campaign: Campaign, name: str) -> None:
    """A candidate that imports one would be kept, and its commit would lack the file."""
    folder = campaign.task.path / "solution"
    (folder / ".gitignore").write_text("helper.py\nbuild/\n")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x = 1\n")
    (folder / "__pycache__").mkdir(exist_ok=True)
    (folder / "__pycache__" / "helper.pyc").write_text("")
    with pytest.raises(UsageError, match=rf"solution/{name}: added; .gitignore hides it, so no commit would have it"):
        run(campaign, 1.1)
    assert "helper.pyc" not in campaign.state().refused[0].reason
    (folder / name).unlink()
    assert run(campaign, 1.1).decision is Decision.KEEP


def test_bytes_that_are_no_text_are_shown_as_such(campaign: Campaign) -> None:
    (campaign.task.path / "solution" / "table.txt").write_bytes(b"caf\xe9\n")
    assert run(campaign, 1.1).decision is Decision.KEEP
    assert "+caf\N{REPLACEMENT CHARACTER}" in campaign.state().begun[1].change.patch
    (campaign.task.path / "solution" / os.fsdecode(b"caf\xe9.py")).touch()
    with pytest.raises(UsageError, match=r"solution/caf\N{REPLACEMENT CHARACTER}.py: added; expected a name in UTF-8"):
        run(campaign, 1.2)


def test_what_the_card_allows_is_allowed(campaign: Campaign) -> None:
    folder = campaign.task.path
    (folder / "tests" / "test_new.py").write_text("def test_two():\n    assert True\n")
    with (folder / "tests" / "test_op.py").open("a") as file:
        file.write("\n\ndef test_three():\n    assert True\n")
    (folder / "bench" / "tune.py").write_text("SWEEPS = ()\n")
    (folder / "docs" / "profile.jsonl").write_text("")
    for path in (tuning_page.page, tuning_page.table, tuning_page.choices):  # what `kda tune` writes beside its log
        path(campaign.task).write_text("derived\n")
    assert run(campaign, 1.05).decision is Decision.KEEP


def test_a_log_may_only_grow(campaign: Campaign) -> None:
    task, repository = campaign.task, campaign.repository
    path = task.path / "docs" / "tuning.jsonl"
    path.write_text('{"a": 1}\n')
    git(repository.root, "add", "-A")
    git(repository.root, "commit", "-q", "-m", "a log")
    base = git(repository.root, "rev-parse", "HEAD").strip()
    path.write_text('{"a": 1}\n{"b": 2}\n')
    assert allowed.sorted_changes(repository, task, base)[1] == []
    path.write_text('{"b": 2}\n')
    (bad,) = allowed.sorted_changes(repository, task, base)[1]
    assert bad.endswith("changed; a log is only ever appended to, by kda")


def test_another_judge_than_the_launchs_is_refused(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    now = allowed.protected_hashes(campaign.task)
    monkeypatch.setattr(allowed, "protected_hashes", lambda _: {**now, "harness": "0" * 64})
    with pytest.raises(UsageError, match=r"harness: sha256 was [0-9a-f]{12} at the launch, is 000000000000"):
        run(campaign, 1.1)


def test_an_edited_record_is_refused_and_made_whole_again(campaign: Campaign) -> None:
    run(campaign, 1.05)
    copy = campaign.repository.root / campaign.copy
    copy.write_text(copy.read_text().replace('"keep"', '"revert"'))
    speed(campaign, 1.2)
    with pytest.raises(UsageError, match="holds lines that were never recorded"):
        iterate.iterate(campaign, "again: wider loads")
    assert copy.read_bytes() == campaign.journal.content()
    assert iterate.iterate(campaign, "again: wider loads").decision is Decision.KEEP


def test_an_edited_journal_names_its_line(campaign: Campaign) -> None:
    run(campaign, 1.05)
    path = campaign.journal.path
    path.write_text(path.read_text().replace(HYPOTHESIS, "another one"))
    with pytest.raises(LedgerError, match=r":3: does not follow from the line before it"):
        campaign.state()


# ---- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  ", "one\ntwo", "x" * (due.LONGEST + 1)])
def test_one_idea_is_one_line(campaign: Campaign, text: str) -> None:
    speed(campaign, 1.1)
    with pytest.raises(UsageError, match=r"-m: expected one line of 1 to 200 characters"):
        iterate.iterate(campaign, text)
    assert campaign.state().tries == 0


def test_nothing_changed_is_no_iteration(campaign: Campaign) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        iterate.iterate(campaign, HYPOTHESIS)
    (campaign.task.path / "docs" / "dispatch.md").write_text("# notes alone\n")
    with pytest.raises(UsageError, match="nothing to measure"):
        iterate.iterate(campaign, HYPOTHESIS)


def test_a_change_too_large_for_one_idea(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(checkout, monkeypatch, "changed_lines = 5\n")
    monkeypatch.setattr(iterate, "demand_idle_gpu", lambda: True)
    (made.task.path / "solution" / "more.py").write_text("x = 1\n" * 6)
    with pytest.raises(UsageError, match=r"changes by 6 lines, expected 5 or fewer"):
        iterate.iterate(made, HYPOTHESIS)


def test_after_a_stall_a_profile_and_a_direction_are_due(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(checkout, monkeypatch)
    monkeypatch.setattr(iterate, "measure", judge())
    monkeypatch.setattr(iterate, "demand_idle_gpu", lambda: True)
    monkeypatch.setattr(iterate, "demand_upstream", lambda _: None)  # it would ask torch for the GPU
    monkeypatch.setattr(due.gpu_state, "has_gpu", lambda: True)
    profile = ["first"]
    monkeypatch.setattr(iterate, "_last_profile", lambda _: profile[0])
    words = "I give up on smaller blocks and try wider loads, as stalls on memory say"
    with pytest.raises(UsageError, match=r"--direction: none is due"):
        run(made, 0.98, direction=words)
    for place_ in range(3):
        assert run(made, 0.98 + place_ / 1000, f"idea {place_}").decision is Decision.REVERT
    wrong = ((None, "3 iterations without improvement"), ("try harder", r"8 words or more"), (words, "new profile"))
    for given, expected in wrong:
        with pytest.raises(UsageError, match=expected):
            run(made, 0.99, "idea 4", direction=given)
    profile[0] = "second"
    assert run(made, 0.991, "idea 4", direction=words).decision is Decision.REVERT
    assert made.state().stalled == 1, "the new direction has its own three"
    assert run(made, 1.1, "idea 5").decision is Decision.KEEP
    assert made.state().stalled == 0


def test_budgets_end_the_campaign(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(checkout, monkeypatch, "tries = 2\n")
    monkeypatch.setattr(iterate, "measure", judge())
    monkeypatch.setattr(iterate, "demand_idle_gpu", lambda: True)
    assert run(made, 1.1).test.share == pytest.approx(0.02)  # type: ignore[union-attr]
    run(made, 1.2, "wider")
    assert made.state().ended == "2 of 2 tries are spent"
    with pytest.raises(UsageError, match=r"has ended: 2 of 2 tries are spent"):
        run(made, 1.3, "wider still")
    assert len(made.state().begun) == 2


def test_hours_end_the_campaign(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    from kda_tools.campaign.state import State

    monkeypatch.setattr(State, "hours", lambda *_: 24.5)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"24.5 of 24 hours are spent"):
            run(campaign, 1.1)
    assert sum(one.event.kind == "ended" for one in campaign.journal.read()) == 1


def test_an_agents_own_commits_are_folded_into_the_iteration(campaign: Campaign) -> None:
    speed(campaign, 1.08)
    root = campaign.repository.root
    git(root, "commit", "-q", "-a", "-m", "mine")
    assert iterate.iterate(campaign, HYPOTHESIS).decision is Decision.KEEP
    assert git(root, "log", "--format=%s", f"main..{campaign.branch}").splitlines() == [f"[iter 1] {HYPOTHESIS}"]


def test_without_a_gpu_nothing_is_kept_as_better(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    timed = judge()

    def untimed(*given: object) -> object:
        found = timed(*given)
        bare = tuple(row.model_copy(update={"metric": None, "samples": {}}) for row in found.rows)
        return replace(found, gpu=None, rows=bare)

    monkeypatch.setattr(iterate, "measure", untimed)
    done = run(campaign, 9.0)
    assert (done.decision, done.test) == (Decision.CHECKED, None)
    assert "# speed: 9.0" in solution(campaign), "it stays on the branch"
    assert campaign.state().best == campaign.state().launched.base
    assert "speed" not in best_solution(campaign)
    monkeypatch.setattr(iterate, "measure", timed)
    assert run(campaign, 9.5, "the same with a GPU").decision is Decision.KEEP


# ---- killed -----------------------------------------------------------------------------------


def killed_at(step: str, act: Callable[[Callable[[str], None]], object]) -> None:
    """Run `act` in a child that ends itself with SIGKILL at this step; however it ends, never back into pytest."""
    if (child := os.fork()) == 0:
        try:
            act(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended with {status} before the step {step}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("value", [1.05, 0.95], ids=["kept", "reverted"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_and_resumed(campaign: Campaign, step: str, value: float) -> None:
    speed(campaign, value)
    killed_at(step, lambda passed: iterate.iterate(campaign, HYPOTHESIS, passed=passed))
    iterate.finish_interrupted(campaign)
    state = campaign.state()
    if step == "candidate":  # nothing was begun; the agent asks once more
        assert state.tries == 0
        iterate.iterate(campaign, HYPOTHESIS)
        state = campaign.state()
    expected = Decision.KEEP if value > 1 else Decision.REVERT
    assert [done.decision for done in state.finished_iterations.values()] == [expected]
    assert state.tries == (2 if step in ("begun", "measured") else 1), "what was repeated counts as a try"
    root = campaign.repository.root
    assert ("# speed: 1.05" in solution(campaign)) is (value > 1)
    assert ("# speed: 1.05" in best_solution(campaign)) is (value > 1)
    assert git(root, "log", "--format=%s", f"main..{campaign.branch}").splitlines() == [f"[iter 1] {HYPOTHESIS}"]
    assert git(root, "show", f"{campaign.branch}:{campaign.copy}").encode() == campaign.journal.content()
    assert git(root, "status", "--porcelain") == ""
    before = campaign.journal.content()
    iterate.finish_interrupted(campaign)
    assert campaign.journal.content() == before, "nothing is left to be done"


def test_killed_twice_counts_as_failed(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    speed(campaign, 1.05)
    killed_at("begun", lambda passed: iterate.iterate(campaign, HYPOTHESIS, passed=passed))
    speed(campaign, 1.06)  # the agent has gone on meanwhile: what it wrote is not lost either
    killed_at("measured", lambda passed: iterate.finish_interrupted(campaign, passed))
    speed(campaign, 1.07)
    iterate.finish_interrupted(campaign)
    (done,) = campaign.state().finished_iterations.values()
    assert (done.decision, done.reason) == (Decision.FAILED, "attempt 2 was interrupted: it counts as failed")
    refs = git(campaign.repository.root, "for-each-ref", "--format=%(refname)", "refs/kda/*/aside-*").split()
    kept = [git(campaign.repository.root, "show", f"{ref}:{campaign.folder}/solution/__init__.py") for ref in refs]
    assert sorted(re.findall(r"# speed: (.*)", "".join(kept))) == ["1.06", "1.07"]
    told = capsys.readouterr().err
    assert f"interruption: {campaign.folder}/solution/__init__.py: git restore --source refs/kda/" in told


def test_an_unfinished_line_is_set_aside(campaign: Campaign) -> None:
    run(campaign, 1.05)
    whole = campaign.journal.content()
    with campaign.journal.path.open("ab") as file:
        file.write(b'{"schema_version":1,"camp')
    assert len(campaign.state().finished_iterations) == 1
    run(campaign, 1.1, "wider")
    assert campaign.journal.content().startswith(whole)
    assert campaign.journal.path.with_suffix(".torn").read_bytes() == b'{"schema_version":1,"camp\n'
    assert len(campaign.state().finished_iterations) == 2


def test_two_at_once_are_refused(campaign: Campaign) -> None:
    speed(campaign, 1.1)
    with campaign.alone(), pytest.raises(UsageError, match="another command writes to it"):
        iterate.iterate(campaign, HYPOTHESIS)


def test_the_record_is_read_from_the_committed_copy(campaign: Campaign, checkout: Path) -> None:
    run(campaign, 1.05)
    (state,) = recorded(campaign.task)
    assert state.entries[0].campaign == "k90_h200_axpy"
    line = json.loads(campaign.journal.content().splitlines()[1])
    assert Begun.model_validate_json(json.dumps(line["event"])).hypothesis == HYPOTHESIS


def test_elsewhere_there_is_no_campaign(campaign: Campaign, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(UsageError, match=r"got branch main; campaigns of this repository: k90_h200_axpy"):
        place.current_campaign()
