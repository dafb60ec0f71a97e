"""The README and the provenance of an export, made from the task and from the run that was published of it."""

from __future__ import annotations

import inspect
import json
from typing import Any

from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import ledger, provenance
from kda_judge.evidence.run_record import Metric, RunRecord
from kda_tools.project.export.sources import VENDORED, exact_ops
from kda_tools.publish.report import BASELINE, LATEST, SUBJECT, line, median, microseconds, pin_name, published, stale
from kda_tools.publish.row_inputs import inputs

LAUNCHERS = {
    "plain": f"It needs torch and triton; `{VENDORED}/` holds the little that its kernels share. Calls launch through "
    "Triton's own launcher.",
    "runtime": "It needs torch, triton and the package kda-runtime, whose launcher costs the host less than Triton's.",
}

BITS = "With upstream's bits: {ops}. The times below were measured without that setting.\n"


def readme(task: Task, name: str, launcher: str, call: str, exact: bool = False) -> str:
    """The README of an export whose import name is `name`; `call` is the line that imports it; see `collect`."""
    solution = task.load("solution")
    latest = published(task, ledger.read(task.ledger))
    parts = [
        f"# {name}\n\n{task.config.task.title}. Exported from the task {task.folder} of KDA-Pilot, Apache-2.0.\n",
        LAUNCHERS[launcher] + " `provenance.json` says which files of which commit this is.\n",
        *([BITS.format(ops=", ".join(f"`{op}`" for op in exact_ops(task)))] if exact else []),
        "## How to call it\n",
        f"```python\n{call}\n```\n",
        *(_function(getattr(solution, op)) for op in task.config.ops),
        "What the kernels do not take, they leave to plain PyTorch: `why_not(op, ...)` says why a call does.\n",
        "## What it computes\n",
        *dict.fromkeys(_formula(getattr(solution, op)) for op in task.config.ops),
        "## Shapes that models call it with\n",
        "| row | models | inputs |\n|---|---|---|\n"
        + "".join(line(row.id, ", ".join(row.models), inputs(row)) for row in task.workloads if row.production),
        "## Measured\n",
        *(_measured(task, record) for record in latest.values()),
    ]
    return "\n".join(parts if latest else [*parts, "Not measured yet.\n"])


def origin(task: Task, files: dict[str, str]) -> dict[str, Any]:
    """Where an export comes from: commit, hashes, the published runs, and the sha256 of each of its files."""
    git = provenance.git_state(checkout_root())
    runs = {
        target: {"run_id": record.run_id, "stale": bool(stale(task, record))}
        for target, record in published(task, ledger.read(task.ledger)).items()
    }
    return {
        "task": task.folder,
        "op": task.op,
        "commit": git.commit,
        "dirty": git.dirty,
        "hashes": provenance.hashes(task),
        "upstream": provenance.pins(task.config),
        "published_runs": runs,
        "files": files,
    }


def origin_json(task: Task, files: dict[str, str]) -> str:
    """The same as text."""
    return json.dumps(origin(task, files), indent=2) + "\n"


def _function(function: Any) -> str:
    signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor")
    return f"`{function.__name__}{signature}`\n\n```\n{inspect.getdoc(function)}\n```\n"


def _formula(function: Any) -> str:
    """The first paragraphs of the module's docstring: formula and source, up to the idea behind the kernel."""
    module = inspect.getmodule(function)
    text = (inspect.getdoc(module) or "").partition("\nIdea: ")[0].strip()
    return f"```\n{text}\n```\n"


def _measured(task: Task, record: RunRecord) -> str:
    assert record.machine.before is not None
    arms = [name for name in (SUBJECT, BASELINE, LATEST) if name == SUBJECT or name in record.settings.against]
    pins = [pin_name(record.provenance.pins.get(name)) or "this" for name in arms]
    measured = f"{record.machine.before.name}, {record.utc[:10]}, run `{record.run_id}`"
    if stale(task, record):
        measured += ", **stale**: the code has changed since"
    head = ["row", *(f"{pin} on the device" for pin in pins)]
    rows = [row for row in record.rows if row.production]
    table = "".join(line(row.id, *(microseconds(median(row, arm, Metric.DEVICE)) for arm in arms)) for row in rows)
    return (
        f"{measured}. Microseconds of GPU time per call, as a CUDA graph. The host's part depends on the launcher and "
        f"is on the task's page.\n\n{line(*head)}{'|---' * len(head)}|\n{table}"
    )
