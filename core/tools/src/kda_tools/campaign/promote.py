"""Promote the best version: verified again in a clean checkout, in a new process, with fresh seeds; then recorded."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.contract.errors import ArmFailed, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.stats import geomean
from kda_tools.campaign import allowed, decision, review
from kda_tools.campaign.apply import apply_promotion, head, logs
from kda_tools.campaign.events import Promoted, RowOutcome
from kda_tools.campaign.measure import Measured
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.promote_run import Given, Wanted
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.state import State
from kda_tools.publish import report

SEEDS = 3
"""Number of fresh seeds."""
NO_MODEL = "wins rows and no model"
RUN = "kda_tools.campaign.promote_run"


def promote(campaign: Campaign) -> Promoted:
    """Verify the best version afresh; record it if it passes.

    Raises:
        UsageError: there is nothing to promote, the review is missing, findings are not answered, or the ledger or
            the grid's log was changed in the worktree.
        MissingRequirement: no GPU. Everything that needs none is verified first, and nothing is recorded.
    """
    apply_promotion(campaign)  # finishes one that was interrupted
    state = campaign.state()
    _demand_reviewed(campaign, state)
    _demand_logs(campaign, state)
    seeds = tuple(secrets.randbits(62) for _ in range(SEEDS))
    with review.best_checkout(campaign) as task:
        if bad := allowed.sorted_changes(Repository(task.path.parents[1]), task, state.launched.base)[1]:
            raise UsageError("\n".join(["the best version changes what the card does not allow:", *bad]))
        given = _in_a_new_process(task, state, seeds)
    promoted = judged(campaign.task, state, seeds, given)
    if given.run is None and given.failure is None:
        raise MissingRequirement(
            f"promote: {given.verified_rows} frozen rows with fresh seeds and {given.grid_rows} rows of the grid "
            f"agree with the oracle, in a clean checkout. The result needs a GPU, {state.launched.target}: repeat it "
            "there. Nothing was recorded"
        )
    _demand_logs(campaign, state)  # again: verifying takes minutes
    campaign.journal.append(promoted)
    campaign.sync(campaign.state())
    apply_promotion(campaign)
    return promoted


def judged(task: Task, state: State, seeds: tuple[int, ...], given: Given) -> Promoted:
    """The event of a promotion: refused with a reason, or recorded with its wins and losses."""
    pairs = Measured("", None, given.before).pairs
    refused = given.failure
    if refused is None and given.run is not None and (why := report.publishable(task, given.run)):
        refused = f"the run cannot be published: {'; '.join(why[:3])}"
    losses = decision.lost(pairs, 0.0)  # however little: the published result names all slower rows
    wins, models = decision.won(pairs), winning_models(task, given.before)
    marks = [f"wins {len(wins)} rows and loses {len(losses)}"] if wins and losses else []
    marks += [NO_MODEL] if wins and not models else []
    return Promoted(
        commit=state.best,
        seeds=seeds,
        grid_rows=given.grid_rows,
        verified_rows=given.verified_rows,
        run_id=given.run.run_id if given.run is not None and refused is None else None,
        reason=f"refused: {refused}" if refused else "; ".join(["recorded", *marks]),
        wins=tuple(wins),
        losses=tuple(losses),
        models=tuple(models),
        run=given.run,
        grid=given.grid,
        rows=given.before,
    )


def winning_models(task: Task, rows: Sequence[RowOutcome]) -> list[str]:
    """Models whose rows are faster on the whole: the interval of their geometric mean lies above 1."""
    pairs = Measured("", None, tuple(rows)).pairs
    named = sorted({model for row in task.workloads for model in row.models})
    found = []
    for model in named:
        own = [pairs[row.id] for row in task.workloads if model in row.models and row.id in pairs]
        if own and geomean(own).low > 1:
            found.append(model)
    return found


def _demand_reviewed(campaign: Campaign, state: State) -> None:
    if review.last_kept(campaign) is None:
        raise UsageError(f"campaign {campaign.name}: nothing to promote: no iteration was kept")
    if state.open_iteration is not None:
        raise UsageError(
            f"iteration {state.open_iteration.iteration} was interrupted: kda campaign resume, then promote"
        )
    review.check(campaign)
    state = campaign.state()
    if not [one for one in state.reviews if one.by != review.PROGRAM]:
        raise UsageError(
            "promote: nobody has reviewed the best version: kda campaign review --agent NAME, or go through the "
            "checklist of kda campaign review and sign it with --person NAME"
        )
    if waiting := state.unanswered:
        lines = [f"  {one.number}: {one.check}: {one.where}: {one.text}" for one in waiting]
        raise UsageError("\n".join(["promote: findings are not answered (kda campaign answer NUMBER TEXT):", *lines]))


def _demand_logs(campaign: Campaign, state: State) -> None:
    """Refuse logs that differ from the last iteration's commit: the promotion would commit the difference."""
    changed = campaign.repository.changed(head(campaign, state))
    if bad := [name for name in logs(campaign) if name in changed]:
        raise UsageError(
            f"promote: {', '.join(bad)}: expected as in the last iteration's commit, got other lines in the worktree; "
            "take them back, and repeat this"
        )


def _in_a_new_process(task: Task, state: State, seeds: tuple[int, ...]) -> Given:
    root = task.path.parents[1]
    launched = state.launched
    with TemporaryDirectory(prefix="kda-promote-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        wanted = Wanted(seeds=seeds, base=launched.base, target=launched.target, rules=launched.rules)
        request.write_text(wanted.model_dump_json(), encoding="utf-8")
        own = [str(path) for path in sorted(root.glob("core/*/src"))]
        env = {**os.environ, "KDA_ROOT": str(root), "PYTHONPATH": os.pathsep.join([*own, *_inherited(own)])}
        command = [sys.executable, "-m", RUN, str(task.path), str(request), str(answer)]
        ran = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
        if not answer.is_file():
            tail = "\n".join(ran.stderr.strip().splitlines()[-5:])
            raise ArmFailed(f"promote: the verifying process ended with {ran.returncode} and no answer:\n{tail}")
        return Given.model_validate_json(answer.read_text(encoding="utf-8"))


def _inherited(own: list[str]) -> list[str]:
    """The import path of this process, if the checkout has no sources of its own (`own`)."""
    from kda_judge.contract.task_import import import_path

    return [] if own else import_path().split(os.pathsep)
