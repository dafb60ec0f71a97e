"""What follows from an iteration's two lines: worktree, commit, branches, and the committed copy of the record.

Everything here may be done again: after an interruption it is.
"""

from __future__ import annotations

from collections.abc import Callable

from kda_tools.campaign import allowed
from kda_tools.campaign.events import Begun, Decision, Done
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.state import State

Steps = Callable[[str], None]


def head(campaign: Campaign, state: State) -> str:
    """The commit of the last iteration, whatever the agent has committed since; at first the base."""
    return campaign.repository.commit_of(campaign.head_ref) or state.launched.base


def apply(campaign: Campaign, begun: Begun, done: Done, passed: Steps) -> None:
    """Worktree, record's copy, commit, branches: all follow from the two events, as often as it is done."""
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
    """Whether the last commit is that iteration's."""
    told = campaign.repository.ask("log", "-1", "--format=%(trailers:key=Kda-Iteration,valueonly)", campaign.head_ref)
    return (told or "").strip() == str(number)


def put_aside(campaign: Campaign, expected: str) -> None:
    """Keep what was changed since the interruption, under a reference of its own, before it is overwritten."""
    paths = [path for path in campaign.repository.changed(expected) if path != campaign.copy]
    if paths:
        aside = campaign.repository.commit(campaign.repository.tree(expected, paths), expected, "put aside\n")
        campaign.repository.run("update-ref", f"refs/kda/{campaign.name}/aside", aside)


def _message(begun: Begun, done: Done) -> str:
    return (
        f"[iter {begun.iteration}] {begun.hypothesis}\n\n{done.decision.value}: {done.reason}\n\n"
        f"Kda-Iteration: {begun.iteration}\nKda-Decision: {done.decision.value}\nKda-Candidate: {begun.commit}\n"
    )


def _is_kept(campaign: Campaign, path: str) -> bool:
    return path.removeprefix(f"{campaign.folder}/") in allowed.KEPT
