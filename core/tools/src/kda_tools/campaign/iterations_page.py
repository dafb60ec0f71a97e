"""Write `docs/iterations.md` of a task from its recorded campaigns: a plot, and every step with its change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.campaign import iterations_plot, views
from kda_tools.campaign.events import Begun, Claimed, Done, RowOutcome
from kda_tools.campaign.history import gain, recorded
from kda_tools.campaign.state import State
from kda_tools.publish.plots import FOLDER
from kda_tools.publish.report import HEADER, microseconds, ratio, table_md
from kda_tools.publish.tables import replace_block
from kda_tools.publish.write_pages import write_pages

PAGE = "iterations.md"
GUIDE, BLOCK = Path("docs") / "campaigns.md", "recorded-campaigns"
FENCE = "`" * 8
"""Longer than any fence in a diff."""


def publish(root: Path, tasks: Iterable[Task], check: bool) -> list[str]:
    """Write the pages and plots of every task with a campaign, and the list of them in the guide; returns what changed.

    Raises:
        LedgerError: a record that was edited.
        MissingRequirement: matplotlib is missing, or not the release that the bytes are made with.
        UsageError: the guide lacks the markers of its block.
    """
    found = [(task, states) for task in tasks if (states := recorded(task))]
    wanted: dict[Path, str] = {}
    for task, states in found:
        wanted |= contents(task, states)
    if (guide := root / GUIDE).is_file():
        try:
            text = replace_block(guide.read_text(encoding="utf-8"), BLOCK, _list_md(root, found))
        except ValueError as error:
            raise UsageError(f"{guide}: {error}") from None
        wanted[guide] = text
    return write_pages(wanted, check)


def contents(task: Task, states: Sequence[State]) -> dict[Path, str]:
    """Path -> text of the page and its plots."""
    docs, parts, files = task.path / "docs", [], {}
    for number, state in enumerate(states, start=1):
        picture = ""
        if (svg := iterations_plot.draw(state)) is not None:
            place = f"{FOLDER}/campaigns/{_name(state)}-{number}.svg"
            files[docs / place] = svg
            picture = f"![{iterations_plot.SAYS}]({place})\n\n"
        parts.append(_campaign_md(state, picture))
    files[docs / PAGE] = "\n".join([f"{HEADER}\n# Campaigns of {task.folder}\n", *parts])
    return files


def _list_md(root: Path, found: Sequence[tuple[Task, list[State]]]) -> str:
    """Every recorded campaign, one line each."""
    if not found:
        return "None is recorded yet."
    lines = (
        (
            f"[{_name(state)}](../{(task.path / 'docs' / PAGE).relative_to(root).as_posix()})",
            state.entries[0].utc[:10],
            ", ".join(state.agents),
            _gpu(state),
            _counts(state),
        )
        for task, states in found
        for state in states
    )
    return table_md(("campaign", "launched", "agent", "GPU", "iterations"), lines).rstrip()


def _campaign_md(state: State, picture: str) -> str:
    launched = state.launched
    agents = ", ".join(state.agents)
    head = f"Launched {state.entries[0].utc[:10]}, agent `{agents}`, base `{launched.base[:10]}`, {_gpu(state)}."
    facts = [_counts(state), *views.lines(state), *([f"ended: {state.ended}"] if state.ended else [])]
    parts = [f"## {_name(state)}\n", f"{head}\n", "\n".join(f"- {fact}" for fact in facts) + "\n", picture]
    if state.begun or state.claimed:
        lines = [_line(begun, state.finished_iterations.get(number)) for number, begun in state.begun.items()]
        lines += [
            (str(one.iteration), "claimed", one.hypothesis or one.title, _claim(one), "-", "-") for one in state.claimed
        ]
        parts.append(table_md(("#", "decision", "what was tried", "what decided", "lines", "s"), lines))
    parts += [_step_md(begun, state.finished_iterations.get(number)) for number, begun in state.begun.items()]
    parts += [_claimed_md(one) for one in state.claimed]
    return "\n".join(parts)


def _line(begun: Begun, done: Done | None) -> tuple[str, ...]:
    change = f"+{begun.change.added} -{begun.change.removed}"
    if done is None:
        return str(begun.iteration), "interrupted", begun.hypothesis, "-", change, "-"
    return str(begun.iteration), done.decision.value, begun.hypothesis, gain(done), change, f"{done.seconds:.0f}"


def _step_md(begun: Begun, done: Done | None) -> str:
    """One step: how it ended, its rows, and its diff."""
    parts = [f"### Iteration {begun.iteration}: {begun.hypothesis}\n"]
    if begun.direction:
        parts.append(f"Change of direction: {begun.direction}\n")
    if done is not None:
        parts.append(f"**{done.decision.value}**: {done.reason}. Candidate `{begun.commit[:10]}`.\n")
        parts.append(_rows_md(done.rows))
    return "\n".join([*parts, _diff(begun.change.patch)])


def _claimed_md(one: Claimed) -> str:
    parts = [f"### Iteration {one.iteration}: {one.title}\n", f"**claimed**: {_claim(one)}.\n"]
    parts += [f"{name}: {text}\n" for name, text in (("Changes", one.changes), ("Analysis", one.analysis)) if text]
    return "\n".join([*parts, _diff(one.patch)])


def _claim(one: Claimed) -> str:
    claimed = f", {one.speedup:g} times as fast" if one.speedup is not None else ""
    return f"{one.status}{claimed}, as its agent says" + ("; brought into the solution" if one.taken else "")


def _rows_md(rows: Sequence[RowOutcome]) -> str:
    timed = [row for row in rows if row.metric is not None]
    if not timed:
        return ""
    head = ("row", "clock", "best us", "candidate us", "best / candidate")
    return table_md(head, ((row.id, str(row.metric), *_cells(row)) for row in timed))


def _cells(row: RowOutcome) -> Iterator[str]:
    best, candidate = row.medians.get("best"), row.medians.get("solution")
    yield from (microseconds(best), microseconds(candidate), ratio(best / candidate if best and candidate else None))


def _diff(patch: str) -> str:
    return f"{FENCE}diff\n{patch.rstrip()}\n{FENCE}\n" if patch.strip() else ""


def _name(state: State) -> str:
    return state.entries[0].campaign


def _gpu(state: State) -> str:
    return ", ".join(dict.fromkeys(done.gpu for done in state.finished_iterations.values() if done.gpu)) or "no GPU"


def _counts(state: State) -> str:
    """`4 iterations: 1 keep, 2 revert, 1 failed`."""
    decisions = [
        *(done.decision.value for done in state.finished_iterations.values()),
        *("claimed" for _ in state.claimed),
    ]
    each = ", ".join(f"{decisions.count(name)} {name}" for name in dict.fromkeys(decisions))
    return f"{len(decisions)} iterations{': ' * bool(each)}{each}"
