"""Calls of a task's rows as source text: what makes their inputs, and tables of operands, tolerances and rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload

FILLS = {"normal", "arange", "randint", "cos", "sin", "cos_sin", "scale", "expert_ids", "slots"}
INPUTS = '''
def make(spec):
    """One input, as `spec` (shape, dtype, stride, fill, low, high) says."""
    dtype = getattr(torch, spec["dtype"])
    shape = spec["shape"]
    fill = spec["fill"]
    if fill == "normal":
        value = torch.randn(shape, device="cuda").to(dtype)
    elif fill == "scale":
        value = torch.exp2(torch.rand(shape, device="cuda") * 12 - 6).to(dtype)
    elif fill == "expert_ids":
        scores = torch.rand(shape[0], spec["high"], device="cuda")
        value = scores.topk(shape[1]).indices.to(dtype)
    elif fill == "slots":
        count = torch.Size(shape).numel()
        value = torch.randperm(spec["high"], device="cuda")[:count]
        value = value.view(shape).to(dtype)
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


OFF = '''

def off(name, one, other):
    """Why the output `name` is not as close to another one as the task allows, or None."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    within = UNITS.get(name, -1)
    if within is None:
        return None  # any order is as good, and the other outputs tell a wrong one
    if within >= 0:
        beyond = (numbered(one) - numbered(other)).abs() - within
    else:
        atol, rtol = TOLERANCES[str(one.dtype).removeprefix("torch.")]
        beyond = (one.double() - other.double()).abs()
        beyond -= atol + rtol * other.double().abs()
    if bool((beyond <= 0).all()):  # NaN is not
        return None
    return f"{name}: off by up to {beyond.max().item():.3g} more than allowed"


def numbered(value):
    """Integers in the order of values: neighbours of the dtype are one apart."""
    if not value.dtype.is_floating_point:
        return value.long()
    size = value.element_size()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    bits = value.contiguous().view(kind).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * size - 1) - 1)), bits)
'''
BY_POSITION, BY_NAME = re.compile(r"\(\*(given|expected_in), "), r'(**dict(zip(OPERANDS[row["op"]], \1)), '


def operands(task: Task, ops: Iterable[str]) -> str:
    """Source of two tables: op -> the names of its tensors, and of its outputs, in order."""
    source = ""
    for table, names in (("OPERANDS", "inputs"), ("OUTPUTS", "outputs")):
        lines = "".join(f'    "{op}": {json.dumps(getattr(task.config.ops[op], names))},\n' for op in ops)
        source += f"{table} = {{\n{lines}}}\n"
    return source


def tolerances(task: Task, ops: Iterable[str]) -> str:
    """Source of two tables: dtype -> atol and rtol; output with a rule -> how many numbers of its dtype apart.

    Both sides may be as far from the truth as the rule allows. None where any order is right.
    """
    given = task.config.tolerance.items()
    lines = "".join(f'    "{dtype}": ({one.atol!r}, {one.rtol!r}),\n' for dtype, one in given)
    rules = {name: rule for op in ops for name, rule in task.config.ops[op].rules.items() if rule.alone}
    units = {name: 2 * rule.within if rule.rule == "units" else None for name, rule in rules.items()}
    most = "".join(f'    "{name}": {one!r},\n' for name, one in units.items())
    return f"TOLERANCES = {{\n{lines}}}\nUNITS = {{\n{most}}}\n"


def tensors_passed(task: Task, ops: Iterable[str], text: str) -> str:
    """Source in which calls pass tensors by name, where a scalar stands before one of them in a signature."""
    return BY_POSITION.sub(BY_NAME, text) if any(task.config.ops[op].by_name for op in ops) else text


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
            **({"low": spec.low, "high": spec.high} if spec.high is not None else {}),
        }
    return {"id": row.id, "op": row.op, "inplace": row.inplace, "inputs": inputs, "scalars": dict(row.scalars)}
