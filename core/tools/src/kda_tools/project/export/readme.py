"""Make the README and the provenance of an export from the task and its published runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import provenance
from kda_judge.evidence.provenance import library
from kda_judge.evidence.run_record import Metric, RunRecord
from kda_tools.project.export.sources import VENDORED, exact_ops, switched_ops
from kda_tools.publish.report import (
    BASELINE,
    LATEST,
    SUBJECT,
    median,
    microseconds,
    pin_name,
    published_runs,
    stale,
    table_md,
)
from kda_tools.publish.row_inputs import inputs

LAUNCHERS = {
    "plain": f"It needs torch and triton; `{VENDORED}/` holds the little that its kernels share. Calls launch through "
    "Triton's own launcher.",
    "runtime": "It needs torch, triton and kda-runtime, whose launcher costs the host less than Triton's: "
    "`pip install core/runtime` in a checkout of KDA-Pilot.",
}
CUTE = "Kernels in the CuTe DSL also need nvidia-cutlass-dsl; without it they are off, and only `why_not` says so."
PROVENANCE = "`provenance.json` says which files of which commit this is."
BITS = "It gives upstream's bits, in {ops}: these round where upstream's own kernels do.{times}\n"
MEASURED = "## Measured\n"
UNMEASURED = "Not measured yet.\n"


def readme(task: Task, name: str, launcher: str, call: str, exact: bool = False) -> str:
    """The README of an export; `name` is its import name, `call` the line that imports it; `exact` as in `collect`."""
    solution = task.load("solution")
    called = ((row.id, ", ".join(row.models), inputs(row)) for row in task.workloads if row.production)
    parts = [
        f"# {name}\n\n{task.config.task.title}. Exported from the task {task.folder} of KDA-Pilot, Apache-2.0.\n",
        f"{LAUNCHERS[launcher]} {f'{CUTE} ' * ('cute_compile.py' in library(task.path / 'solution'))}{PROVENANCE}\n",
        *([_bits(task, exact_ops(task))] if exact else []),
        "## How to call it\n",
        f"```python\n{call}\n```\n",
        *(_function(getattr(solution, op)) for op in task.config.ops),
        "What the kernels do not take, they leave to plain PyTorch: `why_not(op, ...)` says why a call does.\n",
        "## What it computes\n",
        *dict.fromkeys(_formula(getattr(solution, op)) for op in task.config.ops),
        "## Shapes that models call it with\n",
        table_md(("row", "models", "inputs"), called),
        MEASURED,
        *_all_measured(task, list(task.config.ops)),
    ]
    return "\n".join(parts)


def port_readme(task: Task, package: str, shared: str, ops: Sequence[str], about: Sequence[str], exact: bool) -> str:
    """The README of a port: the package `package` in a tree, with the functions `ops`; `shared` is that of all ports.

    `about`: paragraphs on who calls it, when, and what its numerics are.
    """
    solution = task.load("solution")
    parts = [
        f"# {package}\n\n{task.config.task.title}.\n",
        f"From the task {task.folder} of KDA-Pilot, by `kda port`; Apache-2.0. {PROVENANCE}\n",
        f"`{shared}` holds what the kernels share.\n",
        *(f"{one}\n" for one in about),
        *([_bits(task, ops)] if exact else []),
        "## What it computes\n",
        *dict.fromkeys(_formula(getattr(solution, op)) for op in ops),
        MEASURED,
        *_all_measured(task, ops),
    ]
    return "\n".join(parts)


def is_measured(task: Task) -> bool:
    """Whether a run of the task is published."""
    return bool(published_runs(task))


def _bits(task: Task, ops: Sequence[str]) -> str:
    times = " The times below were measured without that." if is_measured(task) and switched_ops(task, ops) else ""
    return BITS.format(ops=", ".join(f"`{op}`" for op in ops), times=times)


def _all_measured(task: Task, ops: Sequence[str]) -> list[str]:
    """Tables of every published run that has rows of these ops."""
    records = published_runs(task).values()
    tables = [_measured(task, record, ops) for record in records if any(row.op in ops for row in record.rows)]
    return tables or [UNMEASURED]


def origin(task: Task, files: dict[str, str]) -> dict[str, Any]:
    """Where an export comes from: commit, hashes, the published runs, and the sha256 of each of its files."""
    git = provenance.git_state(checkout_root())
    runs = {
        target: {"run_id": record.run_id, "stale": bool(stale(task, record))}
        for target, record in published_runs(task).items()
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
    """`origin` as JSON text."""
    return json.dumps(origin(task, files), indent=2) + "\n"


def _function(function: Any) -> str:
    signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor")
    return f"`{function.__name__}{signature}`\n\n```\n{inspect.getdoc(function)}\n```\n"


def _formula(function: Any) -> str:
    """The first paragraphs of the module's docstring: formula and source, up to the idea behind the kernel."""
    module = inspect.getmodule(function)
    text = (inspect.getdoc(module) or "").partition("\nIdea: ")[0].strip()
    return f"```\n{text}\n```\n"


def _measured(task: Task, record: RunRecord, ops: Sequence[str]) -> str:
    assert record.machine.before is not None
    arms = [name for name in (SUBJECT, BASELINE, LATEST) if name == SUBJECT or name in record.settings.against]
    pins = [pin_name(record.provenance.pins.get(name)) or "this" for name in arms]
    measured = f"{record.machine.before.name}, {record.utc[:10]}, run `{record.run_id}`"
    if stale(task, record):
        measured += ", **stale**: the code has changed since"
    head = ["row", *(f"{pin} on the device" for pin in pins)]
    rows = [row for row in record.rows if row.production and row.op in ops]
    lines = ((row.id, *(microseconds(median(row, arm, Metric.DEVICE)) for arm in arms)) for row in rows)
    return (
        f"{measured}. Microseconds of GPU time per call, as a CUDA graph. The host's part depends on the launcher and "
        f"is on the task's page.\n\n{table_md(head, lines)}"
    )
