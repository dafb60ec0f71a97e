"""Calls of a task's rows as source text: what makes their inputs, and tables of operands, tolerances and rows."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload

FILLS = {"normal", "arange", "randint", "cos", "sin", "cos_sin"}
INPUTS = '''
def make(spec):
    """One input, as `spec` (shape, dtype, stride, fill, low, high) says."""
    dtype = getattr(torch, spec["dtype"])
    shape = spec["shape"]
    fill = spec["fill"]
    if fill == "normal":
        value = torch.randn(shape, device="cuda").to(dtype)
    elif fill == "randint":
        value = torch.randint(spec["low"], spec["high"], shape, device="cuda").to(dtype)
    elif fill == "arange":
        value = torch.arange(shape[-1], device="cuda").expand(shape).to(dtype)
    else:  # rotary tables: positions along the first dimension but for [B, H, S, D]
        width = shape[-1] // 2 if fill == "cos_sin" else shape[-1]
        axis = 2 if len(shape) == 4 else 0
        steps = torch.arange(width, device="cuda", dtype=torch.float64)
        rate = 1e4 ** (-steps / width)
        angle = torch.arange(shape[axis], device="cuda", dtype=torch.float64)
        angle = angle[:, None] * rate
        if fill == "cos_sin":
            table = torch.cat([angle.cos(), angle.sin()], dim=-1)
        else:
            table = getattr(angle, fill)()
        value = table.expand(shape).to(dtype)
    stride = spec["stride"]
    if stride is None:
        return value.contiguous()
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    view = torch.zeros(size, device="cuda", dtype=dtype).as_strided(shape, stride)
    return view.copy_(value)


def arguments(row):
    """The tensors of a call in their order (None where the row has none), and its scalars."""
    torch.manual_seed(0)
    names = OPERANDS[row["op"]]
    made = [make(row["inputs"][n]) if n in row["inputs"] else None for n in names]
    return made, row["scalars"]
'''


def operands(task: Task, ops: Iterable[str]) -> str:
    """Source of a table: op -> the names of its tensors, in order."""
    lines = "".join(f'    "{op}": {json.dumps(task.config.ops[op].inputs)},\n' for op in ops)
    return f"OPERANDS = {{\n{lines}}}\n"


def tolerances(task: Task) -> str:
    """Source of a table: dtype -> atol and rtol."""
    given = task.config.tolerance.items()
    lines = "".join(f'    "{dtype}": ({one.atol!r}, {one.rtol!r}),\n' for dtype, one in given)
    return f"TOLERANCES = {{\n{lines}}}\n"


def rows_text(task: Task, rows: Iterable[Workload]) -> str:
    """Source of the list of rows."""
    lines = "\n".join(json.dumps(_row(task, row)) for row in rows)
    return f'ROWS = [json.loads(line) for line in r"""\n{lines}\n""".split("\\n") if line]\n\n'


def _row(task: Task, row: Workload) -> dict[str, object]:
    inputs = {}
    for name, spec in row.inputs.items():
        if spec.fill not in FILLS:
            raise UsageError(f"{task.path}: row {row.id!r}: fill {spec.fill!r}: a port's test knows {sorted(FILLS)}")
        inputs[name] = {
            "shape": spec.shape,
            "dtype": spec.dtype,
            "stride": spec.stride,
            "fill": spec.fill,
            **({"low": spec.low, "high": spec.high} if spec.fill == "randint" else {}),
        }
    return {"id": row.id, "op": row.op, "inplace": row.inplace, "inputs": inputs, "scalars": dict(row.scalars)}
