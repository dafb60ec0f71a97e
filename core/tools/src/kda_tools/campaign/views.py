"""Print a campaign on the terminal: how an iteration ended, and where everything stands."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from kda_tools.campaign.events import Begun, Decision, Done, Finding
from kda_tools.campaign.history import gain
from kda_tools.campaign.place import Campaign
from kda_tools.campaign.state import State
from kda_tools.publish.report import interval
from kda_tools.terminal import console

COLOUR = {Decision.KEEP: "green", Decision.REVERT: "yellow", Decision.CHECKED: "cyan", Decision.FAILED: "red"}


def print_done(begun: Begun, done: Done) -> None:
    """Print one iteration, row by row."""
    out = console()
    if any(row.metric for row in done.rows):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        table.add_column("row", no_wrap=True)
        for head in ("clock", "best us", "candidate us", "best / candidate", "limit us"):
            table.add_column(head, justify="right")
        for row in done.rows:
            old, new = row.medians.get("best"), row.medians.get("solution")
            ratio = f"{old / new:.4f}" if old and new else "-"
            cells = [row.metric or "-", *(f"{us:.2f}" if us else "-" for us in (old, new)), ratio]
            table.add_row(Text(row.id), *cells, f"{row.limit_us:.2f}" if row.limit_us else "-")
        out.print(table)
    words = f"iteration {begun.iteration}: {done.decision.value}: {done.reason}"
    out.print(Text(words, style=COLOUR[done.decision]))
    if done.wins and done.losses:
        out.print(Text(f"faster on {', '.join(done.wins)}; slower on {', '.join(done.losses)}", style="yellow"))


def print_status(campaign: Campaign, state: State) -> None:
    """Print the best so far, what was tried, and what is left of the budgets."""
    out, rules = console(), state.launched.rules
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("decision", no_wrap=True)
    table.add_column("lines", justify="right")
    table.add_column("hypothesis")
    table.add_column("what decided")
    table.add_column("s", justify="right")
    for number, begun in state.begun.items():
        done = state.finished_iterations.get(number)
        change = f"+{begun.change.added} -{begun.change.removed}"
        if done is None:
            table.add_row(str(number), "interrupted", change, Text(begun.hypothesis), "kda campaign resume", "-")
            continue
        mark = Text(done.decision.value, style=COLOUR[done.decision])
        table.add_row(str(number), mark, change, Text(begun.hypothesis), Text(gain(done)), f"{done.seconds:.0f}")
    out.print(Text(f"campaign {campaign.name}: agent {', then '.join(state.agents)}, base {state.launched.base[:10]}"))
    if state.begun:
        out.print(table)
    for line in lines(state):
        out.print(Text(line))
    out.print(
        Text(
            f"left: {max(rules.tries - state.tries, 0)} of {rules.tries} tries, "
            f"{max(rules.hours - state.hours(), 0):.1f} of {rules.hours:g} hours"
        )
    )
    if state.ended:
        out.print(Text(f"ended: {state.ended}", style="yellow"))


def lines(state: State) -> Iterator[str]:
    """The best so far, refusals, findings and what is due, one line each."""
    kept = [(number, done) for number, done in state.finished_iterations.items() if done.decision is Decision.KEEP]
    if kept:
        number, done = kept[-1]
        mean = done.against_baseline
        words = f": {interval(mean)} against the baseline" if mean else ""
        yield f"best so far: iteration {number}{words}; commit {state.best[:10]}"
    else:
        yield f"best so far: the base, commit {state.best[:10]}"
    unmeasured = sum(done.decision is Decision.CHECKED for done in state.finished_iterations.values())
    if unmeasured:
        yield f"{unmeasured} iterations were verified and compiled without a GPU; nothing says that they are faster"
    if state.claimed:
        yield f"{len(state.claimed)} iterations of another harness: its agent's claims, not measured here"
    if state.refused:
        yield f"{len(state.refused)} refused, the last one: {state.refused[-1].reason}"
    if state.stalled >= state.launched.rules.stall:
        wanted = "--direction, and on a GPU a new profile"
        yield f"{state.stalled} iterations without improvement: the next one needs {wanted}"
    for one in state.unanswered:
        yield f"not answered: {finding(one)}"
    for promoted in state.promoted[-1:]:
        yield f"promotion of {promoted.commit[:10]}: {promoted.reason}"


def finding(one: Finding) -> str:
    """One finding in a line."""
    return f"{one.number}: {one.check} ({one.by}): {one.where}: {one.text}"
