"""Writes the calls of a task's rows as source text: code for their inputs, tables of operands, tolerances and rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from textwrap import indent
from typing import Any

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

ROTARY = ("cos", "sin", "cos_sin")
"""Fills that are tables of angles."""
MADE = {
    "normal": """
value = torch.randn(shape, device="cuda").to(dtype)
""",
    "scale": """
value = torch.exp2(torch.rand(shape, device="cuda") * 12 - 6).to(dtype)
""",
    "expert_ids": """
scores = torch.rand(shape[0], spec["high"], device="cuda")
value = scores.topk(shape[1]).indices.to(dtype)
""",
    "slots": """
count = torch.Size(shape).numel()
value = torch.randperm(spec["high"], device="cuda")[:count]
value = value.view(shape).to(dtype)
""",
    "randint": """
low, high = spec.get("low", 0), spec["high"]
value = torch.randint(low, high, shape, device="cuda").to(dtype)
""",
    "arange": """
value = torch.arange(shape[-1], device="cuda").expand(shape).to(dtype)
""",
}
"""Fill -> the source that makes `value` of `shape` and `dtype`."""
FILLS = {*MADE, *ROTARY}
ANGLES = """
# Positions are along the first dimension, but for [B, H, S, D].
width = {width}
axis = 2 if len(shape) == 4 else 0
steps = torch.arange(width, device="cuda", dtype=torch.float64)
rate = 1e4 ** (-steps / width)
angle = torch.arange(shape[axis], device="cuda", dtype=torch.float64)
angle = angle[:, None] * rate
{table}
value = table.expand(shape).to(dtype)
"""
MAKE = '''
def make(spec):
    """One input, as `spec` (shape, dtype{keys}) says."""
    dtype = getattr(torch, spec["dtype"])
    shape = spec["shape"]
{fills}{strides}

def arguments(row):
    """The tensors of a call in their order{or_none}, and its scalars."""
    torch.manual_seed(0)
    names, specs = OPERANDS[row["op"]], row["inputs"]
    made = [{made} for n in names]
    return made, row["scalars"]
'''
STRIDES = """    if "stride" not in spec:
        return value.contiguous()
    stride = spec["stride"]
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    view = torch.zeros(size, device="cuda", dtype=dtype).as_strided(shape, stride)
    return view.copy_(value)
"""
OFF = '''

def off(name, one, other):
    """Why the output `name` is not as close to another one as the task allows, or None."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
'''
FREE = """    if name in FREE:
        return None  # any order is as good, and the other outputs tell a wrong one
"""
WITHIN = """    atol, rtol = TOLERANCES[str(one.dtype).removeprefix("torch.")]
    beyond = (one.double() - other.double()).abs()
    beyond -= atol + rtol * other.double().abs()
"""
DIFFERENCE = """    if bool((beyond <= 0).all()):  # NaN is not
        return None
    return f"{name}: off by up to {beyond.max().item():.3g} more than allowed"
"""
NUMBERED = '''

def numbered(value):
    """Integers in the order of values: neighbours of the dtype are one apart."""
    if not value.dtype.is_floating_point:
        return value.long()
    size = value.element_size()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    bits = value.contiguous().view(kind).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * size - 1) - 1)), bits)
'''
ROWS = '''COMMON = {{
{common}}}


def row_of(line):
    """A row, with what rows of its op have in common; inputs that are alike stand together in a line."""
    row = {{"op": "{first}", **json.loads(line)}}
    common = COMMON[row["op"]]
    specs = {{}}
    for names, spec in row["inputs"].items():
        spec = spec if isinstance(spec, dict) else {{"shape": spec}}
        specs |= {{n: {{**common["inputs"].get(n, {{}}), **spec}} for n in names.split()}}
    return {{**common, **row, "inputs": specs}}


LINES = r"""
{lines}
"""
ROWS = [row_of(line) for line in LINES.strip().split("\\n")]

'''
MOST_FURTHER = 24
"""Usual limit on the number of a test's rows beside those of production."""
BY_POSITION = re.compile(r"\((\w+\[[^(]*\], )?\*(given|expected_in), ")
BY_NAME = r'(\1**dict(zip(OPERANDS[row["op"]], \2)), '


def operands(task: Task, ops: Iterable[str], outputs: bool = True) -> str:
    """Source of two tables: op -> the names of its input tensors, and (with `outputs`) of its outputs, in order."""
    source = ""
    for table, names in (("OPERANDS", "inputs"), ("OUTPUTS", "outputs"))[: 1 + outputs]:
        lines = "".join(f'    "{op}": {json.dumps(getattr(task.config.ops[op], names))},\n' for op in ops)
        source += f"{table} = {{\n{lines}}}\n"
    return source


def tolerances(task: Task, ops: Iterable[str]) -> str:
    """Source of tables: dtype -> atol and rtol; output with a rule -> most numbers of its dtype between two sides.

    That is twice the rule's number, because each side may be that far from the truth. `FREE` lists outputs that may
    have any order.
    """
    given = task.config.tolerance.items()
    text = _table("TOLERANCES", {dtype: (one.atol, one.rtol) for dtype, one in given})
    units, free = _rules(task, ops)
    return text + (_table("UNITS", units) if units else "") + (f"FREE = {json.dumps(free)}\n" if free else "")


def comparison(task: Task, ops: Iterable[str]) -> str:
    """Source of the function that compares outputs by the tables of `tolerances`."""
    units, free = _rules(task, ops)
    text = OFF + (FREE if free else "")
    if units:
        apart = "beyond = (numbered(one) - numbered(other)).abs() - UNITS[name]"
        text += f"    if name in UNITS:\n        {apart}\n    else:\n{indent(WITHIN, '    ')}"
    else:
        text += WITHIN
    return text + DIFFERENCE + (NUMBERED if units else "")


def _rules(task: Task, ops: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    rules = {name: rule for op in ops for name, rule in task.config.ops[op].rules.items() if rule.alone}
    units = {name: 2 * rule.within for name, rule in rules.items() if rule.rule == "units"}
    return units, sorted(set(rules) - set(units))


def _table(name: str, values: Mapping[str, object]) -> str:
    return f"{name} = {{\n{_entries(values)}}}\n"


def _entries(values: Mapping[str, object], level: int = 1) -> str:
    """The entries of a dictionary, one per line; a nested dictionary takes several lines if one would be too long."""
    text = ""
    for key, value in values.items():
        line = f'{"    " * level}"{key}": {value!r},\n'.replace("'", '"')
        if isinstance(value, dict) and len(line) > 88:
            line = f'{"    " * level}"{key}": {{\n{_entries(value, level + 1)}{"    " * level}}},\n'
        text += line
    return text


def makers(task: Task, rows: Sequence[Workload], device: str = '"cuda"') -> str:
    """Source that makes the rows' arguments on `device`, an expression; it covers only what these rows need."""
    specs = [spec for row in rows for spec in row.inputs.values()]
    fills = {spec.fill for spec in specs}
    parts = [(f'fill == "{fill}"', source) for fill, source in MADE.items() if fill in fills]
    if tables := [fill for fill in ROTARY if fill in fills]:
        parts.append((f"fill in {tuple(tables)}".replace("'", '"'), _angles(tables)))
    strided = any(spec.stride is not None for spec in specs)
    keys = [*(["stride"] if strided else []), *(["fill"] if fills != {"normal"} else [])]
    keys += ["low, high"] if any(spec.high is not None for spec in specs) else []
    text = '    fill = spec.get("fill", "normal")\n' if len(parts) > 1 or tables else ""
    for number, (test, source) in enumerate(parts):
        last = number == len(parts) - 1
        branch = f"    {'el' if number else ''}if {test}:\n" if not last else "    else:\n"
        text += (
            branch + indent(source.strip("\n") + "\n", " " * 8)
            if len(parts) > 1
            else indent(source.strip("\n"), " " * 4) + "\n"
        )
    spec = '{"dtype": row["dtype"], **specs[n]}'
    absent = any(name not in row.inputs for row in rows for name in task.config.ops[row.op].inputs)
    return MAKE.format(
        keys="".join(f", {key}" for key in keys),
        fills=text,
        strides=STRIDES if strided else "    return value.contiguous()\n",
        or_none=" (None where the row has none)" if absent else "",
        made=f"make({spec}) if n in specs else None" if absent else f"make({spec})",
    ).replace('device="cuda"', f"device={device}")


def _angles(fills: Sequence[str]) -> str:
    """Source that makes tables of angles for these fills."""
    whole = "getattr(angle, fill)()" if len(fills) > 1 else f"angle.{fills[0]}()"
    both = "torch.cat([angle.cos(), angle.sin()], dim=-1)"
    if "cos_sin" not in fills:
        return ANGLES.format(width="shape[-1]", table=f"table = {whole}")
    if len(fills) == 1:
        return ANGLES.format(width="shape[-1] // 2", table=f"table = {both}")
    table = f'if fill == "cos_sin":\n    table = {both}\nelse:\n    table = getattr(angle, fill)()'
    return ANGLES.format(width='shape[-1] // 2 if fill == "cos_sin" else shape[-1]', table=table)


def tensors_passed(task: Task, ops: Iterable[str], text: str) -> str:
    """The source `text`; its calls pass tensors by name if a scalar comes before a tensor in some signature."""
    return BY_POSITION.sub(BY_NAME, text) if any(task.config.ops[op].by_name for op in ops) else text


def rows_text(task: Task, rows: Sequence[Workload]) -> str:
    """Source of the list of rows; a line leaves out defaults and what `COMMON` holds for its op."""
    full = [_row(task, row) for row in rows]
    common: dict[str, dict[str, Any]] = {}
    for op in dict.fromkeys(row["op"] for row in full):
        mine = [row for row in full if row["op"] == op]
        common[op] = {key: json.loads(_commonest(json.dumps(row[key]) for row in mine)) for key in ("dtype", "scalars")}
        common[op]["inputs"] = _always([row["inputs"] for row in mine])
    lines = "\n".join(json.dumps(_short(row, common, next(iter(common)))) for row in full)
    return ROWS.format(common=_entries(common), first=next(iter(common), ""), lines=lines)


def _row(task: Task, row: Workload) -> dict[str, Any]:
    dtype = _commonest(spec.dtype for spec in row.inputs.values())
    inputs = {}
    for name, spec in row.inputs.items():
        if spec.fill not in FILLS:
            raise UsageError(f"{task.path}: row {row.id!r}: fill {spec.fill!r}: a port's test knows {sorted(FILLS)}")
        inputs[name] = {
            "shape": spec.shape,
            **({"dtype": spec.dtype} if spec.dtype != dtype else {}),
            **({"stride": spec.stride} if spec.stride is not None else {}),
            **({"fill": spec.fill} if spec.fill != "normal" else {}),
            **({"low": spec.low} if spec.low else {}),
            **({"high": spec.high} if spec.high is not None else {}),
        }
    return {"id": row.id, "op": row.op, "dtype": dtype, "inputs": inputs, "scalars": dict(row.scalars)}


def _always(rows: Sequence[Mapping[str, Mapping[str, object]]]) -> dict[str, dict[str, object]]:
    """Input -> its properties that are the same in all rows that have it, without shape and strides."""
    found: dict[str, dict[str, object]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        specs = [row[name] for row in rows if name in row]
        same = {key: value for key, value in specs[0].items() if all(spec.get(key) == value for spec in specs)}
        found[name] = {key: value for key, value in same.items() if key not in ("shape", "stride")}
    return {name: own for name, own in found.items() if own}


def _short(row: Mapping[str, Any], common: Mapping[str, Mapping[str, Any]], first: str) -> dict[str, object]:
    """The row without the common parts; inputs that are alike share one key."""
    mine = common[row["op"]]
    named: dict[str, tuple[list[str], object]] = {}
    for name, spec in row["inputs"].items():
        own = {key: value for key, value in spec.items() if key not in mine["inputs"].get(name, ())}
        value = own if len(own) > 1 else own["shape"]
        named.setdefault(json.dumps(value), ([], value))[0].append(name)
    made: dict[str, object] = {"id": row["id"], **({"op": row["op"]} if row["op"] != first else {})}
    made |= {"dtype": row["dtype"]} if row["dtype"] != mine["dtype"] else {}
    made["inputs"] = {" ".join(names): value for names, value in named.values()}
    return made | ({"scalars": row["scalars"]} if row["scalars"] != mine["scalars"] else {})


def _commonest(values: Iterable[str]) -> str:
    """The most frequent value; of equally frequent ones the first."""
    counts = Counter(values)
    return max(counts, key=counts.__getitem__, default="float32")


def chosen(rows: Sequence[Workload], most: int = MOST_FURTHER) -> list[Workload]:
    """The rows of production and about `most` further rows that add something new, in the given order.

    Further rows are added first until every op, dtype, form of strides and fill occurs, even if that takes more than
    `most`. Then come finer properties (of each input by itself, absent inputs, widths, scalars), then pairs of
    properties of a whole row. Each step adds the row with the most new properties, the first of equally good ones.
    """
    kept = [row for row in rows if row.production]
    rest = [row for row in rows if not row.production]
    have = {one for row in kept for one in (*coarse(row), *_fine(row), *_pairs(row))}
    further = 0
    for kinds, limit in ((coarse, len(rest)), (_fine, most), (_pairs, most)):
        while rest and further < limit:
            gains = [len(kinds(row) - have) for row in rest]
            if not max(gains):
                break
            row = rest.pop(gains.index(max(gains)))
            kept.append(row)
            have |= coarse(row) | _fine(row) | _pairs(row)
            further += 1
    ids = {row.id for row in kept}
    return [row for row in rows if row.id in ids]


def coarse(row: Workload) -> set[tuple[object, ...]]:
    """What a test has to cover: the row's op with its dtypes, forms of strides, and fills."""
    specs = row.inputs.values()
    found = {kind for spec in specs for kind in (("dtype", spec.dtype), ("form", form(spec)), ("fill", spec.fill))}
    return {(row.op,), *((row.op, *kind) for kind in found)}


def _fine(row: Workload) -> set[tuple[object, ...]]:
    found = set(_kinds(row))
    for name, spec in row.inputs.items():
        width = spec.shape[-1] if spec.shape else 1
        found |= {(name, spec.dtype), (name, form(spec)), (name, spec.fill)}
        found |= {(name, "repeated", *(size == 1 for size in spec.shape))}
        found |= {(name, "width", min(width & -width, 16)), (name, "size", width.bit_length())}
    return {(row.op, "fine", *one) for one in found}


def _pairs(row: Workload) -> set[tuple[object, ...]]:
    return {(row.op, "pair", *pair) for pair in combinations(_kinds(row), 2)}


def _kinds(row: Workload) -> list[tuple[object, ...]]:
    """Properties of a row as a whole."""
    specs = row.inputs.values()
    scalars = [("scalar", name, value) for name, value in row.scalars.items() if not isinstance(value, float)]
    forms = ("forms", *(form(spec) for spec in specs))
    shapes = ("shapes", *("".join("1" if size == 1 else "n" for size in spec.shape) for spec in specs))
    return [("inputs", *row.inputs), ("dtypes", *(spec.dtype for spec in specs)), forms, shapes, *scalars]


def form(spec: TensorSpec) -> str:
    """Strides of a tensor, a character per dimension: 1 size one, 0 repeated, c contiguous, g gaps; empty if packed."""
    if spec.stride is None:
        return ""
    packed = OutputSpec(shape=spec.shape, dtype=spec.dtype).strides
    pairs = zip(spec.shape, spec.stride, packed, strict=True)
    return "".join("1" if n == 1 else "0" if step == 0 else "c" if step == whole else "g" for n, step, whole in pairs)
