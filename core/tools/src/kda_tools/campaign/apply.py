"""Bring worktree, commits, branches and the committed copy of the record in line with the recorded events.

Every step can be repeated, and is repeated after an interruption.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from kda_judge.evidence import ledger, record_log
from kda_tools.campaign import allowed
from kda_tools.campaign.events import Begun, Decision, Done, Ended
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.repository import as_utf8
from kda_tools.campaign.state import State
from kda_tools.lab.grid import grid_record

Steps = Callable[[str], None]


def head(campaign: Campaign, state: State) -> str:
    """The commit of the last iteration, whatever the agent has committed since; before any iteration, the base."""
    return campaign.repository.commit_of(campaign.head_ref) or state.launched.base


def apply(campaign: Campaign, begun: Begun, done: Done, passed: Steps) -> None:
    """Derive worktree, record's copy, commit and branches from the two events; this can be repeated."""
    repository, stays = campaign.repository, done.decision in (Decision.KEEP, Decision.CHECKED)
    back = [] if stays else [path for path in begun.change.files if not _is_kept(campaign, path)]
    repository.restore(begun.parent, back)
    passed("restored")
    campaign.sync(campaign.state())
    tree = repository.mixed(begun.commit, begun.parent, back)
    base = repository.commit(tree, begun.parent, "with the record\n")
    commit = repository.commit(repository.tree(base, [campaign.copy]), begun.parent, _message(begun, done))
    moves = {campaign.head_ref: commit, f"refs/heads/{campaign.branch}": commit}
    if done.decision is Decision.KEEP:
        moves[f"refs/heads/{campaign.best_branch}"] = commit
    repository.run("update-ref", "--stdin", given="".join(f"update {ref} {to}\n" for ref, to in moves.items()))
    passed("committed")
    repository.run("read-tree", "--reset", commit)


def is_applied(campaign: Campaign, number: int) -> bool:
    """Whether the last commit is that of iteration `number`."""
    trailer = campaign.repository.ask(
        "log", "-1", "--format=%(trailers:key=Kda-Iteration,valueonly)", campaign.head_ref
    )
    return (trailer or "").strip() == str(number)


def logs(campaign: Campaign) -> list[str]:
    """Paths in the repository of the logs that a promotion appends to."""
    return [f"{campaign.folder}/docs/{name}" for name in ("ledger.jsonl", "grid.jsonl")]


def apply_promotion(campaign: Campaign) -> None:
    """Commit the last promotion's lines of ledger and grid; a refused promotion is in the record alone."""
    state = campaign.state()
    promoted = state.promoted[-1] if state.promoted else None
    if promoted is None or promoted.run is None or promoted.run_id is None:
        return
    repository, parent, task = campaign.repository, head(campaign, state), campaign.task
    if promoted.run_id.encode() in repository.content(parent, logs(campaign)[0]):
        return
    if promoted.run_id not in (run.run_id for run in ledger.read(task.ledger)):
        ledger.append(task.ledger, promoted.run)
    if promoted.grid is not None and promoted.grid.run_id not in (run.run_id for run in grid_record.runs(task)):
        record_log.append(grid_record.log(task), promoted.grid)
    if (ended := Ended(reason=f"promoted as run {promoted.run_id}")) != state.entries[-1].event:
        campaign.journal.append(ended)
    campaign.sync(state)
    paths = [path for path in (campaign.copy, *logs(campaign)) if (repository.root / path).is_file()]
    message = f"[promote] {task.op}: {promoted.reason}\n\nKda-Iteration: {max(state.finished_iterations)}\n"
    commit = repository.commit(repository.tree(parent, paths), parent, message)
    moves = [campaign.head_ref, *(f"refs/heads/{name}" for name in (campaign.branch, campaign.best_branch))]
    repository.run("update-ref", "--stdin", given="".join(f"update {ref} {commit}\n" for ref in moves))
    repository.run("read-tree", "--reset", commit)


def put_aside(campaign: Campaign, expected: str) -> None:
    """Save what was changed since the interruption under a git reference, before it is overwritten, and say so."""
    paths = [path for path in campaign.repository.changed(expected) if path != campaign.copy]
    if paths:
        aside = campaign.repository.commit(campaign.repository.tree(expected, paths), expected, "put aside\n")
        ref = f"refs/kda/{campaign.name}/aside-{aside[:10]}"
        campaign.repository.run("update-ref", ref, aside)
        files = f"{', '.join(map(as_utf8, paths[:3]))}{' ...' * (len(paths) > 3)}"
        notice = f"put aside, since it was changed after the interruption: {files}: git restore --source {ref} -- PATH"
        print(notice, file=sys.stderr)


def _message(begun: Begun, done: Done) -> str:
    return (
        f"[iter {begun.iteration}] {begun.hypothesis}\n\n{done.decision.value}: {done.reason}\n\n"
        f"Kda-Iteration: {begun.iteration}\nKda-Decision: {done.decision.value}\nKda-Candidate: {begun.commit}\n"
    )


def _is_kept(campaign: Campaign, path: str) -> bool:
    return path.removeprefix(f"{campaign.folder}/") in allowed.KEPT
