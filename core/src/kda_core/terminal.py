"""Lists and tables on the terminal that are not a run's table (`view.py`): tasks, grid, kernels, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kda_core import kernels_view, view
from kda_core.records import RunRecord, Verdict

if TYPE_CHECKING:
    from kda_core.aot import CompiledKernel
    from kda_core.doctor import Check
    from kda_core.tasks import Task

PLAIN_WIDTH = 200
"""Columns when output is not a terminal: tables must not wrap in a log."""
SHOWN_FAILURES = 20


def console() -> Console:
    """The console of standard output."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=PLAIN_WIDTH)


def print_run(record: RunRecord) -> None:
    """The table and headline of a run."""
    view.print_run(console(), record)


def print_grid(record: RunRecord) -> None:
    """A regression grid in one line, and its failures one by one."""
    out = console()
    failed = [
        row
        for row in record.rows
        if row.verdict in (Verdict.INCORRECT, Verdict.INVALID, Verdict.ERROR, Verdict.TIMEOUT)
    ]
    for row in failed[:SHOWN_FAILURES]:
        out.print(Text(f"{row.id}: {row.verdict.value}: {row.reason}", style="red"))
    if len(failed) > SHOWN_FAILURES:
        out.print(f"... and {len(failed) - SHOWN_FAILURES} more")
    checks = sum(arm.correctness.checks for row in record.rows for arm in row.arms.values())
    out.print(
        f"{record.task}: {len(record.rows) - len(failed)} of {len(record.rows)} rows agree with the oracle "
        f"({checks} calls compared in full, on {'a GPU' if record.machine.kind == 'cuda' else 'the CPU'})"
    )


def print_tasks(tasks: Sequence[Task]) -> None:
    """One line per task."""
    table = Table("op", "task", "title", "rows", "arms")
    for task in tasks:
        arms = ", ".join(task.config.arms)
        table.add_row(task.op, f"{task.family}/{task.folder}", task.config.task.title, str(len(task.workloads)), arms)
    console().print(table)


def print_kernels(kernels: Sequence[CompiledKernel]) -> None:
    """What the compiler made of each kernel."""
    kernels_view.print_kernels(console(), kernels)


def print_checks(checks: Sequence[Check]) -> None:
    """What is there, and for what is missing the command that brings it."""
    table = Table("", "what", "found", "needed for", "remedy")
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("missing", style="yellow")
        table.add_row(mark, check.name, check.found, check.needed_for, "" if check.ok else check.remedy)
    console().print(table)
