"""Make the generated blocks of a family's map, `<family>/README.md`, from contracts, rows and ledgers."""

from collections.abc import Iterable
from pathlib import Path

from kda_judge.contract.tasks import Task
from kda_tools.publish.report import NONE, STALE, interval, stale, table_md
from kda_tools.publish.tables import OWN, SHOWN, Runs, StepNames, against_pins, shown_pins
from kda_tools.publish.task_notes import leftovers

NOT_PUBLISHED = "no published run"
STEP_PAGES = ("models/docs", "docs")
"""Where a family may have the pages of its models' steps, from its folder."""


def blocks(runs: Runs, family: Path, step_names: StepNames) -> dict[str, str]:
    """Name of the block -> its Markdown, for the tasks of the family in that folder.

    The map leaves out a task that still has parts of the task it was copied from: they are not its own yet.
    """
    own = [(task, latest) for task, latest in runs if not leftovers(task)]
    return {"tasks": _tasks(own), "models": _models([task for task, _ in own], family, step_names)}


def _tasks(runs: Runs) -> str:
    """One line per task and measured GPU: what the task computes, and the headline; unmeasured tasks get one line."""
    records = [record for _, latest in runs for record in latest.values()]
    pins = shown_pins(records)
    over = (f"vs {pin or OWN}" for pin in pins)
    head = ("task", "computes", "functions", "production rows", "GPU", *over, "attained")
    lines = []
    for task, latest in runs:
        rows = sum(row.production for row in task.workloads)
        functions = ", ".join(f"`{op}`" for op in task.config.ops)
        names = f"[{task.folder}]({task.folder}/docs/results.md), [card]({task.folder}/prompt.md)"
        first = [names, task.config.task.title, functions, str(rows)]
        for record in latest.values():
            assert record.machine.before is not None
            assert record.headline is not None
            gpu = record.machine.before.name + STALE * bool(stale(task, record))
            lines.append([*first, gpu, *against_pins(record, pins), interval(record.headline.attained)])
        if not latest:
            lines.append([*first, NOT_PUBLISHED, *(NONE for _ in pins), NONE])
    why = f" *{OWN.capitalize()}*: the arm that a task names for ops that no pinned release has." * ("" in pins)
    return f"Speedups are geometric means of {SHOWN}.{why}\n\n{table_md(head, lines)}"


def _models(tasks: Iterable[Task], family: Path, step_names: StepNames) -> str:
    """Serving model -> its step, and the tasks whose production rows come from its traffic, with the number of rows."""
    calls: dict[str, dict[str, int]] = {}
    for task in tasks:
        for row in task.workloads:
            for model in row.models if row.production else ():
                rows = calls.setdefault(model, {})
                rows[task.folder] = rows.get(task.folder, 0) + 1
    lines = []
    for model in sorted(calls):
        parts = step_names.get(model, (model,))
        pages = [(part, f"{folder}/{part}.md") for part in parts for folder in STEP_PAGES]
        steps = ", ".join(f"[{part}]({page})" for part, page in pages if (family / page).is_file())
        rows = calls[model]
        lines.append(
            (model, steps or NONE, ", ".join(f"[{task}]({task}/docs/results.md) ({rows[task]})" for task in rows))
        )
    return table_md(("model", "its step", "production rows by task"), lines)
