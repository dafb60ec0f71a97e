"""Print lists and tables on the terminal: tasks, rows, grid, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kda_judge.contract.errors import KdaError
from kda_judge.evidence.run_record import RunRecord
from kda_judge.judge.open_row import footprint
from kda_tools.lab.grid.grid_record import failures, opponents_outside
from kda_tools.publish.report import arm_name
from kda_tools.terminal import console

if TYPE_CHECKING:
    from kda_judge.contract.tasks import Task
    from kda_tools.project.check import Check

SHOWN_FAILURES = 20


def print_grid(record: RunRecord) -> None:
    """A regression grid in one line, its failures one by one, and rows on which an opponent is wrong."""
    out = console()
    failed = failures(record)
    for row in failed[:SHOWN_FAILURES]:
        out.print(Text(f"{row.id}: {row.verdict.value}: {row.reason}", style="red"))
    if len(failed) > SHOWN_FAILURES:
        out.print(f"... and {len(failed) - SHOWN_FAILURES} more")
    checks = sum(arm.correctness.checks for row in record.rows for arm in row.arms.values())
    out.print(
        f"{record.task}: {len(record.rows) - len(failed)} of {len(record.rows)} rows agree with the oracle "
        f"({checks} calls compared in full, on {'a GPU' if record.machine.kind == 'cuda' else 'the CPU'})"
    )
    for arm, ids in opponents_outside(record).items():
        more = f", and {len(ids) - SHOWN_FAILURES} more" if len(ids) > SHOWN_FAILURES else ""
        out.print(
            f"{record.task}: {len(ids)} row{'s'[: len(ids) != 1]} on which {arm_name(record, arm)} itself "
            f"is outside the tolerance or refuses: {', '.join(ids[:SHOWN_FAILURES])}{more}"
        )


def print_tasks(tasks: Sequence[Task]) -> list[str]:
    """Print one line per task; returns what is wrong with those that cannot be read.

    On a narrow terminal the titles wrap, so that names that a user types are never cut.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("rows", no_wrap=True, justify="right")
    table.add_column("title")
    wrong = []
    for task in tasks:
        try:
            title, rows = Text(task.config.task.title), str(len(task.workloads))
        except KdaError as error:
            wrong.append(str(error))
            title, rows = Text("cannot be read", style="red"), "-"
        table.add_row(task.op, f"{task.family}/{task.folder}", rows, title)
    console().print(table)
    return wrong


def print_rows(task: Task) -> None:
    """Print the task's arms, then every frozen row: its id, the bytes of all its tensors, and below it the call."""
    out = console()
    out.print(Text(f"{task.op}: {task.config.task.title}"))
    arms = [f"{name} ({', '.join((*arm.devices, *arm.ops))})" for name, arm in task.config.arms.items()]
    out.print(Text(f"arms: {', '.join(arms)}\n"))
    width = max(len(row.id) for row in task.workloads)
    for row in task.workloads:
        out.print(Text(f"{row.id:{width}}  {footprint(task.config.ops[row.op], row) / 1e6:8.3f} MB"))
        tensors = [f"{name}: {spec.dtype}{list(spec.shape)}" for name, spec in row.inputs.items()]
        scalars = [f"{name}={value!r}" for name, value in row.scalars.items()]
        out.print(Padding(Text(f"{row.op}({', '.join([*tensors, *scalars])})"), (0, 0, 0, 4)))


def print_checks(checks: Sequence[Check]) -> None:
    """Print what is installed; for each missing thing, also what needs it and the remedy."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("missing", style="yellow")
        more = "" if check.ok else f" (for {check.needed_for})\n{check.remedy}"
        table.add_row(mark, Text(check.name), Text(f"{check.found}{more}"))
    console().print(table)
