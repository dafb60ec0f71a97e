"""Review of the best version: a program, then an agent or a person. Findings block promotion until answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.errors import ArmFailed, UsageError
from kda_judge.contract.strict_models import Strict, validate
from kda_judge.contract.tasks import Task
from kda_tools.campaign import agents, bash, confine, launch
from kda_tools.campaign.events import Answered, Decision, Done, Finding, Reviewed
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.review_checks import solution_findings

PROGRAM = "program"
CHECKLIST = (
    "Does anything know where it is called from, how often, with which values, or for which row?",
    "Is a tensor, a buffer or a result kept from one call to the next?",
    "Does work leave the current stream, or go on after the call returns?",
    "Does it start a thread or a process, patch or import what is not its own?",
    "Does a change of rounding or of the order of sums follow the card?",
    "Is a gain explained by a cause that can be measured: bytes, instructions, registers, occupancy, launches?",
)
PROMPT = """Review one kernel. You did not write it. Change nothing but the file that is named at the end.

The task's card is {card}; the solution is the folder {solution}; how it was measured is in {record}.
Its change against the campaign's base:

{diff}

Ask of it:
{questions}

Write what you find to {out}, one JSON object a line:
{{"where": "solution/file.py:12", "text": "what is wrong, in one sentence"}}
Write an empty file where you find nothing. A finding has to be answered before the kernel is promoted: name only
what matters.
"""


class Told(Strict):
    """One line of an agent's findings."""

    where: str
    text: str


def check(campaign: Campaign) -> list[Finding]:
    """Run the program's checks on the best version, and record the findings that are new."""
    state = campaign.state()
    with best_checkout(campaign) as task:
        seen = solution_findings(task, last_kept(campaign))
    known = {(one.check, one.where, one.text) for one in state.findings.values() if one.by == PROGRAM}
    new = [one for one in seen if (one.check, one.where, one.text) not in known]
    return record(campaign, PROGRAM, [(one.check, one.where, one.text) for one in new])


def record(campaign: Campaign, by: str, findings: list[tuple[str, str, str]]) -> list[Finding]:
    """Append findings about the best version, and the line that the review is finished."""
    state = campaign.state()
    number = sum(entry.event.kind == "finding" for entry in state.entries)
    made = [
        Finding(number=number + place, commit=state.best, by=by, check=check, where=where, text=text)
        for place, (check, where, text) in enumerate(findings, start=1)
    ]
    for one in made:
        campaign.journal.append(one)
    campaign.journal.append(Reviewed(commit=state.best, by=by, findings=len(made)))
    campaign.sync(campaign.state())
    return made


def answer(campaign: Campaign, number: int, by: str, text: str) -> None:
    """Answer a finding of the best version.

    Raises:
        UsageError: there is no such finding, or the answer is too short to be one.
    """
    state = campaign.state()
    if number not in state.findings:
        known = ", ".join(map(str, state.findings)) or "none"
        raise UsageError(f"finding {number}: no such finding about the best version; there are: {known}")
    if len(text.split()) < 3:
        raise UsageError(
            f"finding {number}: expected an answer that says why it is harmless or what was changed, got {text!r}"
        )
    campaign.journal.append(Answered(finding=number, by=by, text=text.strip()))
    campaign.sync(campaign.state())


def by_agent(campaign: Campaign, name: str, given: str | None) -> list[Finding]:
    """Have an agent review the best version, started as for a launch, in a clean checkout; records its findings.

    If bwrap confines the agent, it can write to the folder of its findings and to temporary files.

    Raises:
        ArmFailed: the agent ended with an error, or left no findings file: then there was no review.
        UsageError: a line of the findings file is no finding, or `KDA_NO_CLAUDE` is set.
    """
    state, agent = campaign.state(), agents.find_agent(name)
    if launch.prepare_only():
        raise UsageError(
            f"--agent {name}: {launch.PREPARE_ONLY} is set, so that no agent is started; unset it, or review yourself "
            "and sign with --person NAME"
        )
    with best_checkout(campaign) as task, TemporaryDirectory(prefix="kda-review-") as folder:
        out, prompt = Path(folder) / "findings.jsonl", Path(folder) / "prompt.md"
        diff = campaign.repository.diff(state.launched.base, state.best, "--patch", f"{campaign.folder}/solution")
        text = PROMPT.format(
            card=task.path / "prompt.md",
            solution=task.path / "solution",
            record=campaign.repository.root / campaign.copy,
            diff=diff or "(none)",
            questions="\n".join(f"- {question}" for question in CHECKLIST),
            out=out,
        )
        prompt.write_text(text, encoding="utf-8")
        words = {"bash": bash.demand_bash(), "prompt": str(prompt), "worktree": str(task.path), "git": folder}
        words |= {"command": given} if given else {}
        agents.demand_installed(name, agents.started_by(agent, words, text))
        own, cache = [Path(folder), confine.scratch(campaign)], cache_folder(campaign.repository.root)
        code = launch.start(launch.make_process(campaign, agent, words, prompt, task.path, own, cache))
        if code or not out.is_file():
            why = f"it ended with {code}" if code else f"it wrote no {out.name}"
            raise ArmFailed(f"--agent {name}: no review was made: {why}; nothing was recorded")
        lines = [line for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]
        findings = [
            validate(Told, _json(line, out.name, place), f"{out.name}:{place}")
            for place, line in enumerate(lines, start=1)
        ]
    return record(campaign, name, [("agent", one.where, one.text) for one in findings])


def last_kept(campaign: Campaign) -> Done | None:
    """The iteration that made the best version; None if that is the base."""
    kept = [done for done in campaign.state().finished_iterations.values() if done.decision is Decision.KEEP]
    return kept[-1] if kept else None


@contextmanager
def best_checkout(campaign: Campaign) -> Iterator[Task]:
    """The task as it is in the best version, in a clean, temporary checkout.

    It is a clone that shares git's objects and not a worktree: a confined agent may not write git's list of worktrees.
    """
    repository = campaign.repository
    with TemporaryDirectory(prefix="kda-clean-") as folder:
        place = Path(folder) / "checkout"
        repository.run("clone", "--quiet", "--shared", "--no-checkout", str(repository.common), str(place))
        Repository(place).run("checkout", "--quiet", "--detach", campaign.state().best)
        yield Task(place / campaign.folder)


def _json(line: str, name: str, place: int) -> object:
    import json

    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"{name}:{place}: expected a JSON object with where and text: {error}") from None
