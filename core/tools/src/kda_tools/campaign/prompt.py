"""Write the prompt of a campaign from the card, the records and the knowledge of this repository, within a budget.

Sections come in order of worth. One that does not fit is cut at the end of a paragraph or left out, and the prompt's
last section names what was cut or left out, and where it is. A token is counted as four characters, which is close for
English and counts too few tokens for tables: the budget leaves room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path

from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger
from kda_judge.evidence.derive import MEASURED
from kda_tools.campaign.allowed import FREE, LOGS, TESTS
from kda_tools.campaign.events import Decision
from kda_tools.campaign.history import claims, gain, recorded, row_history
from kda_tools.campaign.passages import passages
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.state import State
from kda_tools.knowledge.ranking import Passage
from kda_tools.llm.task_gain import gain_of_steps
from kda_tools.models.task_share import share_of_steps
from kda_tools.project.check import Check
from kda_tools.publish import report, why
from kda_tools.publish.task_notes import HOW_TO_WORK

CHARACTERS = 4
"""Characters of a token."""
RESERVE = 10
"""Tokens for the marks of the last heading, and for its one word if nothing was left out."""
LONGEST = "cut, 100% of it is above"
"""Longest remark on a section in the list of what was left out."""
LEAST = 80
"""Fewest tokens of a cut section; a shorter piece is not worth having."""
MOST_WHYS = 6
MOST_SLOWEST = 2
MOST_PASSAGES = 8


@dataclass(frozen=True)
class Section:
    """One part of the prompt."""

    title: str
    text: str
    where: str
    """Where the whole text is found."""
    must: bool = False
    """Kept whole, whatever the budget: nobody can work without it."""


def tokens(text: str) -> int:
    """Tokens of a text, as counted here."""
    return ceil(len(text) / CHARACTERS)


def compose(sections: Sequence[Section], budget: int) -> str:
    """The prompt: sections in order, cut to the budget, and at the end what was cut or left out."""
    last = f"Left out of this prompt (budget {budget} tokens)"
    needed = [last, *(_absent(one, LONGEST) for one in sections if not one.must)]
    needed += [_shown(one.title, one.text) for one in sections if one.must]
    left = budget - sum(tokens(f"{text}\n") for text in needed) - RESERVE
    parts, absent = [], []
    for one in sections:
        whole = _shown(one.title, one.text)
        room = left + tokens(_absent(one, LONGEST))  # a whole section is not listed
        if one.must:
            parts.append(whole)
        elif tokens(f"{whole}\n") <= room:
            parts.append(whole)
            left = room - tokens(f"{whole}\n")
        else:
            piece = _cut(one.text, left - tokens(_shown(one.title, "")) - 20)
            kept = tokens(piece) >= LEAST
            if kept:
                part = _shown(one.title, f"{piece}\n\n(cut here)")
                parts.append(part)
                left -= tokens(f"{part}\n")
            absent.append(_absent(one, f"cut, {len(piece) / len(one.text):.0%} of it is above" if kept else "left out"))
    return "\n".join([*parts, _shown(last, "\n".join(absent) or "Nothing.")])


def sections(campaign: Campaign, state: State, lacking: Sequence[Check]) -> Iterator[Section]:
    """Everything that a campaign's prompt may say, the most useful first."""
    task = campaign.task
    yield Section("Your campaign", _opening(campaign, state), "this prompt", must=True)
    yield Section("What this machine lacks", _lacking(lacking), "kda doctor", must=True)
    yield Section(
        f"The card: {task.folder}/prompt.md", _read(task.path, "prompt.md"), f"{campaign.folder}/prompt.md", must=True
    )
    yield Section(HOW_TO_WORK, _read(campaign.repository.root, HOW_TO_WORK), HOW_TO_WORK, must=True)
    yield Section("Where it stands", _standing(task, state), "kda campaign status")
    missing = why.missing_rows(task)
    rows, most = (missing, MOST_WHYS) if missing else (_slowest(task), MOST_SLOWEST)
    for row in rows[:most]:
        command = f"kda why {task.op} {row}"
        yield Section(command, why.why(task, row, row_history(task, row)), command)
    if rest := rows[most:]:
        title = "Further rows that miss" if missing else "Further rows, none of which is known to miss"
        yield Section(title, ", ".join(rest), f"kda why {task.op} ROW")
    worth = "What a gain is worth in models"
    if task.family == "llm":
        yield Section(worth, gain_of_steps(task), "llm/docs, kda llm step")
    else:
        yield Section(worth, share_of_steps(task), "diffusion/models, kda model step")
    yield Section("What was tried before", _tried_before(task), f"{campaign.folder}/docs/iterations.jsonl")
    yield Section(
        "Notes: docs/dispatch.md", _read(task.path, "docs/dispatch.md"), f"{campaign.folder}/docs/dispatch.md"
    )
    found = passages(campaign.repository.root, task)
    for passage in found[:MOST_PASSAGES]:
        yield Section(f"{passage.place}: {_heading(passage)}", passage.text, passage.place)
    if more := found[MOST_PASSAGES:]:
        named = "\n".join(f"- {passage.place}: {_heading(passage)}" for passage in more)
        yield Section("Further passages that fit, the best first", named, "the headings of docs/skills and external")


def _heading(passage: Passage) -> str:
    return passage.title.rpartition(" > ")[2]


def _opening(campaign: Campaign, state: State) -> str:
    rules, launched = state.launched.rules, state.launched
    free = ", ".join(f"`{pattern}`" for pattern in (*FREE, *LOGS, f"{TESTS} (only added to)"))
    number = len(state.begun) + 1
    return f"""You optimise one kernel task, `{campaign.task.op}`, for {launched.target}. You are in a git worktree of
its own, `{campaign.folder}` is the task, and your next iteration is number {number}. Work in this loop until a
budget is spent:

1. Read what is below. Choose one idea, and change `solution/` for it alone.
2. Try it while you work with the quick commands below. They record nothing.
3. `kda campaign iterate -m "what you change, and why it should be faster"` is one iteration, and the only way to
   record one. `--rows PATTERN` (may be repeated) names the rows that the idea is about, if not all: they decide. It
   verifies, measures against the baseline and the best so far, keeps or reverts, and commits. After a revert the
   files are the best's again: begin the next idea from there.
4. `kda campaign status` shows what was tried and the budgets. If a command was interrupted:
   `kda campaign resume`.

Rules, which the command enforces:
- You may change in the task's folder: {free}. Anything else is refused and recorded.
- One idea an iteration: one line of hypothesis, at most {rules.changed_lines} changed lines in `solution/`.
- {rules.tries} tries and {rules.hours:g} hours in all. Failures count. A candidate is kept when its gain is clearly
  above 1 at a threshold that all tries share, at least {rules.least_gain:.1%}, and no row is slower by more than
  {rules.row_loss:.0%}.
- After {rules.stall} iterations without improvement the next one needs a new `kda profile` and `--direction "..."`:
  what you give up, what you try instead, which counter says so.
- Write what you tried in vain into `docs/dispatch.md`, with its number: it stays when the code is reverted.
- Do not push, and do not change branches. At the end: `kda campaign review`."""


def _lacking(lacking: Sequence[Check]) -> str:
    lines = [f"- {check.name}: {check.found} (needed for {check.needed_for}): {check.remedy}" for check in lacking]
    gpu = "\nWithout a GPU an iteration verifies and compiles; it is marked so, and nothing is kept as better."
    return "\n".join(lines) + (gpu if any(check.name == "gpu" for check in lacking) else "") if lines else "Nothing."


def _standing(task: Task, state: State) -> str:
    lines = []
    for target, record in report.published_runs(task).items():
        stale = f" It is stale: {len(report.stale(task, record))} parts have changed since." * bool(
            report.stale(task, record)
        )
        lines.append(f"Published for {target}: run {record.run_id}, {len(record.rows)} rows.{stale}")
        for basis in report.bases(record)[:2]:
            values = record.headline.speedup[basis].items() if record.headline else ()
            lines += [f"- {report.WORDS[basis]} against {arm}: {report.interval(value)}" for arm, value in values]
    kept = [number for number, done in state.finished_iterations.items() if done.decision is Decision.KEEP]
    lines.append(
        f"This campaign: {len(state.finished_iterations)} iterations, kept {', '.join(map(str, kept)) or 'none'}."
    )
    lines += [
        f"- {number}: {state.begun[number].hypothesis}: {done.decision.value}: {gain(done)}"
        for number, done in state.finished_iterations.items()
    ]
    return "\n".join(lines)


def _tried_before(task: Task) -> str:
    lines = []
    for state in recorded(task):
        name = state.entries[0].campaign
        lines += [
            f"- {name} {number}: {state.begun[number].hypothesis}: {done.decision.value}: {gain(done)}"
            for number, done in state.finished_iterations.items()
        ]
        lines += [f"- {name} {line}; not measured here" for line in claims(state)]
    return "\n".join(lines) or "No campaign of this task is recorded."


def _slowest(task: Task) -> list[str]:
    """All production rows: first those of the last measured run, the furthest from its limit first; then the others."""
    attained: dict[str, float] = {}
    for record in reversed(ledger.read(task.ledger)):
        attained = {row.id: row.attained for row in record.rows if row.verdict in MEASURED and row.attained}
        if attained:
            break
    return sorted((row.id for row in task.workloads if row.production), key=lambda name: attained.get(name, inf))


def _read(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_text(encoding="utf-8").strip() if path.is_file() else f"{name}: not there"


def _shown(title: str, text: str) -> str:
    return f"# {title}\n\n{text.strip()}\n"


def _absent(section: Section, share: str) -> str:
    return f"- {section.title}: {share}; all of it: {section.where}"


def _cut(text: str, budget: int) -> str:
    """The longest beginning within `budget` tokens that ends with a paragraph, or else with a line."""
    room = max(budget, 0) * CHARACTERS
    if len(text) <= room:
        return text
    head = text[:room]
    end = max(head.rfind("\n\n"), 0) or max(head.rfind("\n"), 0)
    return head[:end].rstrip()
