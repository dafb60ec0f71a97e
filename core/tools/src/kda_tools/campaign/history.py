"""What the campaigns of a task have tried, from the committed `docs/iterations.jsonl`."""

from __future__ import annotations

from fnmatch import fnmatchcase

from kda_judge.contract.tasks import Task
from kda_tools.campaign.events import Done
from kda_tools.campaign.journal import COPY, entries
from kda_tools.campaign.state import State, campaigns


def recorded(task: Task) -> list[State]:
    """Every recorded campaign of the task, oldest first.

    Raises:
        LedgerError: a line that is no event, or that was edited.
    """
    path = task.path / "docs" / COPY
    return campaigns(entries(path.read_bytes(), str(path))) if path.is_file() else []


def row_history(task: Task, row: str) -> list[tuple[str, str]]:
    """Iterations with a pattern that names the row: what was tried, and how it ended, with the number that decided."""
    found = []
    for state in recorded(task):
        for number, done in state.finished_iterations.items():
            begun = state.begun[number]
            if any(fnmatchcase(row, pattern) for pattern in begun.rows):
                name = f"iteration {number} of {state.entries[0].campaign}"
                found.append((f"{name}, {begun.hypothesis}", f"{done.decision.value}: {gain(done)}"))
    return found


def claims(state: State) -> list[str]:
    """One line for each iteration that an agent only claims: what it tried, and how it says that this ended."""
    return [
        f"{one.iteration}: {one.hypothesis or one.title}: {one.status}"
        + (f", {one.speedup:g} times as fast as its agent says" if one.speedup is not None else "")
        for one in state.claimed
    ]


def gain(done: Done) -> str:
    """The gain that decided, or the reason if there is no test."""
    return f"gain {done.test.gain.estimate:.4f}, at least {done.test.low:.4f}" if done.test else done.reason
