"""Check on a sample of the task's rows that an export gives the same bits as the solution it was made from.

`python -m kda_tools.project.export.compare TASK EXPORT` prints how many calls were compared, or the first difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import UsageError
from kda_judge.contract.task_import import import_path, register
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload, shrink
from kda_judge.evidence.gpu_state import has_gpu
from kda_tools.project.export.sources import exact_ops

SAMPLE = {"cuda": 8, "cpu": 4}
"""Device -> most rows of an op from its frozen rows, and as many again from its grid, evenly spread."""
LARGEST = 1 << 28
"""Most elements of a row's inputs, all together; larger rows are left out."""
LARGEST_INTERPRETED = 1 << 22
"""The same for each output without a GPU: Triton's interpreter would take minutes."""


def compare(task: Task, export: Path, exact: bool = False) -> str:
    """Compare in a separate process, on a GPU or in Triton's interpreter; returns what was compared, in words.

    `exact`: with the solution's exact modes.

    Raises:
        UsageError: a call of the export gave other bits, or the comparison failed.
    """
    env = {**os.environ, "PYTHONPATH": import_path()}
    where = "on a GPU"
    if not has_gpu():
        env["TRITON_INTERPRET"], where = "1", "in Triton's interpreter"
    command = [sys.executable, "-m", __name__, str(task.path), str(export), *(["exact"] if exact else [])]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UsageError(
            f"{export}: not the bits of {task.op}'s solution: {ran.stderr.strip()[-2000:] or ran.returncode}"
        )
    counts = json.loads(ran.stdout.splitlines()[-1])
    return f"{counts['calls']} calls give the solution's bits {where}, {counts['kernels']} of them by the kernels"


def main(task: Task, export: Path, exact: bool = False) -> dict[str, int]:
    """Compare in this process.

    Raises:
        AssertionError: names the row and what differs.
    """
    import torch

    from kda_judge.arms.arm_import import tensors_first
    from kda_judge.arms.input_values import Family, make
    from kda_tools.lab.inspect.arm_alone import with_strides

    if os.environ.get("TRITON_INTERPRET") == "1":
        from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does

        convert_as_a_gpu_does()
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, theirs = task.load("solution"), register(f"exported_{task.op}", export)
    for name in exact_ops(task) if exact else ():
        getattr(ours, name).kda_op.set_exact()
    calls = kernels = 0
    for row in _sample(task, device):
        op = task.config.ops[row.op]
        values = make(row, Family.NORMAL, 1, device)
        results = []
        for side in (ours, theirs):
            arguments = [with_strides(values[n], row.inputs[n], device) if n in values else None for n in op.inputs]
            if side is ours:
                why_not = tensors_first(partial(side.why_not, row.op), op.inputs, op.by_name)
                kernels += why_not(*arguments, **row.scalars) is None
            made = tensors_first(getattr(side, row.op), op.inputs, op.by_name)(*arguments, **row.scalars)
            outputs = list(made) if isinstance(made, tuple) else [made]
            given = dict(zip(op.inputs, arguments, strict=True))
            results.append([given[name] for name in row.inplace] if row.inplace else outputs)
        for name, one, other in zip(op.outputs, *results, strict=True):
            _demand_equal(f"row {row.id!r}, output {name!r}", one, other)
        calls += 1
    return {"calls": calls, "kernels": kernels}


def _sample(task: Task, device: str) -> Iterator[Workload]:
    try:
        grid = task.load("bench.grid")
        rest = tuple(grid.thin(tuple(grid.grid())))
    except ModuleNotFoundError:
        rest = ()
    for op in task.config.ops:
        for rows in (task.workloads, rest):
            mine = [row for row in rows if row.op == op]
            if device == "cpu":
                mine = [shrink(row, task.config.cpu.keep, task.config.cpu.shrink) for row in mine]
                mine = [row for row in mine if all(prod(o.shape) <= LARGEST_INTERPRETED for o in row.outputs.values())]
            mine = [row for row in mine if sum(spec.span for spec in row.inputs.values()) <= LARGEST]
            yield from mine[:: max(-(-len(mine) // SAMPLE[device]), 1)]


def _demand_equal(where: str, one: Any, other: Any) -> None:
    import torch

    for fact in ("shape", "dtype", "device"):
        if getattr(one, fact) != getattr(other, fact):
            raise AssertionError(f"{where}: {fact} {getattr(other, fact)}, the solution's {getattr(one, fact)}")
    if one.stride() != other.stride():
        raise AssertionError(f"{where}: strides {other.stride()}, the solution's {one.stride()}")
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    different = (one.contiguous().view(words) != other.contiguous().view(words)).sum().item() if one.numel() else 0
    if different:
        raise AssertionError(f"{where}: {different} of {one.numel()} elements have other bits")


if __name__ == "__main__":
    try:
        print(json.dumps(main(Task(Path(sys.argv[1])), Path(sys.argv[2]), exact=len(sys.argv) > 3)))
    except AssertionError as difference:
        sys.exit(str(difference))
