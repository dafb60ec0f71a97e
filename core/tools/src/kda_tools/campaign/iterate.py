"""Run one iteration: check, note down, measure, decide, record, commit. It may be killed between any two steps.

1. If something is wrong with the command or the worktree, the iteration is refused, and nothing is begun.
2. The candidate becomes a commit, kept under `refs/kda/`; then the line `begun` is written to disk.
3. The candidate is verified and measured, and the decision follows. The line `done` is written to disk.
4. The worktree, the branches and the committed copy of the record follow from the two lines.

`finish_interrupted` does step 4 if it comes after step 3. Between steps 2 and 3 it measures the candidate once more,
from its commit; a second interruption ends the iteration as failed.
"""

from __future__ import annotations

import time

from kda_judge.contract.errors import ArmFailed, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import select
from kda_judge.evidence.record_log import read
from kda_tools.campaign import allowed, decision, due
from kda_tools.campaign.apply import Steps, apply, apply_promotion, head, is_applied, put_aside
from kda_tools.campaign.events import Begun, Change, Decision, Done, Ended, Refused
from kda_tools.campaign.measure import Measured, chosen_rows, demand_idle_gpu, demand_upstream, measure
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.rules import Rules
from kda_tools.campaign.state import State
from kda_tools.lab.profile.profile_record import ProfileRecord, log

ATTEMPTS = 2
"""Attempts at an iteration: without a limit, a candidate that takes the machine down would do so for ever."""
SHOWN = 8
"""Most files that a refusal names one by one."""


def iterate(
    campaign: Campaign,
    hypothesis: str,
    rows: tuple[str, ...] = (),
    direction: str | None = None,
    passed: Steps = lambda _: None,
) -> Done:
    """Run one iteration on what the worktree holds now.

    Args:
        campaign: the campaign of the worktree.
        hypothesis: what is tried and why it should be faster, in one line.
        rows: patterns of the rows that the hypothesis is about; their geometric mean decides. Empty: all measured rows.
        direction: the change of direction, if one is due.
        passed: called with the name of each step that is on disk; tests end the process there.

    Raises:
        UsageError: the iteration cannot begin; says why and what to do. Changes that are not allowed are recorded.
        MissingRequirement: the GPU is busy, or upstream files are missing.
    """
    with campaign.alone():
        _settle(campaign, passed)
        state = campaign.state()
        _demand_budget(campaign, state)
        hypothesis = due.one_line(hypothesis, "-m", due.LONGEST)
        _demand_clean(campaign, state, hypothesis)
        parent = head(campaign, state)
        paths = [path for path in campaign.repository.changed(parent) if path != campaign.copy]
        if not any(path.startswith(f"{campaign.folder}/solution/") for path in paths):
            raise UsageError(
                "nothing to measure: solution/ is what it was after the last iteration; change it, and repeat this"
            )
        profile = _last_profile(campaign)
        due.demand_direction(state, direction, profile)
        _deciding(campaign.task, state.launched.rules, rows)
        demand_idle_gpu()
        demand_upstream(campaign.task)
        tree = campaign.repository.tree(parent, paths)
        number = len(state.begun) + 1
        commit = campaign.repository.commit(tree, parent, f"candidate {number} of {campaign.name}: {hypothesis}\n")
        change = _change(campaign, parent, commit)
        due.demand_one_idea(change, state.launched.rules)
        campaign.repository.run("update-ref", campaign.ref(number), commit)
        passed("candidate")
        begun = Begun(
            iteration=number,
            attempt=1,
            hypothesis=hypothesis,
            rows=rows,
            direction=direction,
            profile=profile,
            parent=parent,
            commit=commit,
            change=change,
        )
        campaign.journal.append(begun)
        passed("begun")
        return _finish(campaign, begun, passed)


def finish_interrupted(campaign: Campaign, passed: Steps = lambda _: None) -> Done | None:
    """Finish an iteration that was interrupted; None if nothing had to be measured again."""
    with campaign.alone():
        return _settle(campaign, passed)


def _settle(campaign: Campaign, passed: Steps) -> Done | None:
    state = campaign.state()
    finished = None
    if (begun := state.open_iteration) is not None:
        put_aside(campaign, begun.commit)
        if begun.attempt >= ATTEMPTS or state.spent():
            why = f"attempt {begun.attempt} was interrupted" + (f", and {spent}" if (spent := state.spent()) else "")
            campaign.journal.append(_failed(begun, f"{why}: it counts as failed", 0.0))
        else:
            demand_upstream(campaign.task)
            campaign.repository.restore(begun.commit, begun.change.files)
            begun = begun.model_copy(update={"attempt": begun.attempt + 1})
            campaign.journal.append(begun)
            passed("begun")
            finished = _finish(campaign, begun, passed)
        state = campaign.state()
    numbers = sorted(state.finished_iterations)
    if numbers and not is_applied(campaign, numbers[-1]):
        apply(campaign, state.begun[numbers[-1]], state.finished_iterations[numbers[-1]], passed)
    elif numbers:
        campaign.repository.run("read-tree", "--reset", head(campaign, state))  # the last step, which leaves no trace
    apply_promotion(campaign)
    return finished


def _finish(campaign: Campaign, begun: Begun, passed: Steps) -> Done:
    """The steps after `begun`: measure, decide, record, apply."""
    state, start = campaign.state(), time.monotonic()
    rules, task = state.launched.rules, campaign.task
    try:
        measured = measure(task, rules, campaign.repository, state.best, state.launched.target)
    except ArmFailed as error:
        done = _failed(begun, f"does not compile: {error}", time.monotonic() - start)
    else:
        passed("measured")
        done = decided(begun, measured, state, _deciding(task, rules, begun.rows))
        done = done.model_copy(update={"seconds": time.monotonic() - start})
    campaign.journal.append(done)
    passed("done")
    apply(campaign, begun, done, passed)
    _demand_budget_noted(campaign)
    return done


def _deciding(task: Task, rules: Rules, patterns: tuple[str, ...]) -> list[str]:
    """The measured rows that decide: all, or those that match `patterns`."""
    measured_ids = chosen_rows(task, rules)
    about = {row.id for row in select(task.workloads, list(patterns))}
    found = [row for row in measured_ids if row in about]
    if not found:
        raise UsageError(
            f"--rows {' '.join(patterns)}: expected a row that the campaign measures, got none of them: "
            f"{', '.join(measured_ids)}"
        )
    return found


def decided(begun: Begun, measured: Measured, state: State, rows: list[str]) -> Done:
    """Keep or revert, from the samples."""
    rules = state.launched.rules
    done = _failed(begun, measured.failure or "", 0.0).model_copy(
        update={"run_id": measured.run_id, "gpu": measured.gpu, "rows": measured.rows, "noisy": measured.noisy}
    )
    if measured.failure is not None:
        return done
    if measured.gpu is None:
        words = "verified and compiled, not measured: there is no GPU here"
        return done.model_copy(update={"decision": Decision.CHECKED, "reason": words})
    if absent := [row for row in rows if row not in measured.pairs]:
        return done.model_copy(update={"reason": f"no times of {', '.join(absent)}"})
    test = decision.test(measured.pairs, rows, rules.tries)
    losses = decision.lost(measured.pairs, rules.row_loss)
    kept, reason = _verdict(test, losses, measured.noisy, rules.least_gain, rules.row_loss)
    return done.model_copy(
        update={
            "decision": Decision.KEEP if kept else Decision.REVERT,
            "reason": reason,
            "test": test,
            "wins": tuple(decision.won(measured.pairs)),
            "losses": tuple(losses),
            "against_baseline": measured.against_baseline(),
        }
    )


def _verdict(
    test: decision.Test, losses: list[str], noisy: tuple[str, ...], least: float, margin: float
) -> tuple[bool, str]:
    words = f"gain {test.gain.estimate:.4f}, at least {test.low:.4f} at this try's share of the risk ({test.share:.2g})"
    if noisy:
        return False, f"{words}; the run is noisy, so that it decides nothing: {noisy[0]}"
    if test.low <= 1:
        return False, f"{words}: not clearly above 1"
    if test.gain.estimate < 1 + least:
        return False, f"{words}: less than {least:.1%}"
    if losses:
        return False, f"{words}, but slower by more than {margin:.0%} on {', '.join(losses)}"
    return True, words


def _failed(begun: Begun, reason: str, seconds: float) -> Done:
    return Done(
        iteration=begun.iteration,
        attempt=begun.attempt,
        decision=Decision.FAILED,
        reason=reason,
        run_id=None,
        gpu=None,
        seconds=seconds,
    )


def _change(campaign: Campaign, parent: str, commit: str) -> Change:
    diff, folder = campaign.repository.diff, f"{campaign.folder}/solution"
    counts = [line.split("\t") for line in diff(parent, commit, "--numstat", folder).splitlines()]
    added, removed = (sum(int(one[side]) for one in counts if one[side].isdecimal()) for side in (0, 1))
    files = filter(None, diff(parent, commit, "--name-only -z").split("\0"))
    return Change(files=tuple(files), added=added, removed=removed, patch=diff(parent, commit, "--patch", folder))


def _last_profile(campaign: Campaign) -> str | None:
    records = read(log(campaign.task), ProfileRecord)
    return records[-1].run_id if records else None


def _demand_budget(campaign: Campaign, state: State) -> None:
    if (why := state.ended or state.spent()) is None:
        return
    if state.ended is None:
        campaign.journal.append(Ended(reason=why))
        campaign.sync(campaign.state())
    raise UsageError(f"campaign {campaign.name} has ended: {why}. Next: kda campaign review, then kda campaign promote")


def _demand_budget_noted(campaign: Campaign) -> None:
    state = campaign.state()
    if state.ended is None and (why := state.spent()):
        campaign.journal.append(Ended(reason=why))
        campaign.sync(state)


def _demand_clean(campaign: Campaign, state: State, hypothesis: str) -> None:
    """Refuse changes that are not allowed, and record the refusal."""
    bad = [f"{campaign.copy}: holds lines that were never recorded"] if campaign.edited(state) else []
    bad += allowed.sorted_changes(campaign.repository, campaign.task, state.launched.base)[1]
    # Last: it can hash only UTF-8 names.
    bad = bad or allowed.changed_since_launch(campaign.task, dict(state.launched.hashes))
    if not bad:
        return
    more = [f"... and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    lines = [*bad[:SHOWN], *more]
    campaign.journal.append(Refused(hypothesis=hypothesis, reason="; ".join(lines)))
    campaign.sync(campaign.state())
    raise UsageError(
        "\n".join(
            [
                "the iteration is refused, and that is recorded: changed beside what docs/work_on_a_task.md allows:",
                *(f"  {line}" for line in lines),
                f"  take it back, for example: git restore --source {state.launched.base[:10]} -- PATH",
            ]
        )
    )
