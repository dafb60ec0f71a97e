"""The regression grid: correctness-only rows over the ops' whole envelope.

A **call** is one of: `first` (norm), `gated` (gate, norm, modulation), `affine` (gate, affine norm), `cross` (no gate,
norm, modulation), `bare` (no gate, affine norm) and `last` (gate alone).

- Shapes: [1, 1024, 3072] and [2, 12, 1280] x {float16, bfloat16, float32} x calls x layouts of temb in front of K and D
  {BS, 1S, B1, 11, B, 1}: 216 rows. temb is in x's dtype, K is 6.
- Widths: 256, 1536, 2304, 4096, 5120, 7936 and 8192 columns x {bfloat16, float32} x calls: 84 rows.
- Dtypes: temb, tables and parameters in other dtypes than x (`MIXED`) x calls: 24 rows.
- Slices: another number of slices than 6, and numbers that are the same, the last, and in any order: 20 rows.
- Layouts: one of x, residual, temb and the tables is a part of a wider tensor, all calls that have it: 23 rows. Each
  slice of temb has all tokens of one batch, as in Helios: 6 rows.

Where x, temb or the tables are float16, temb and the tables are small (cosines): the product of two large draws of the
family `mixed` would be beyond float16.

Thinning for machines without a GPU (`thin`): x of at most [2, 12, 1280] in bfloat16 and float32, and only every second
one of the layouts.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, Fill, TensorSpec
from kda_judge.contract.workloads import Workload

BOTH = "temb_residual_norm_scale_shift"
CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "first": ("temb_norm_scale_shift", ("x", "temb", "table")),
    "gated": (BOTH, ("residual", "x", "temb", "gate_table", "table")),
    "affine": (BOTH, ("residual", "x", "temb", "gate_table", "weight", "bias")),
    "cross": (BOTH, ("residual", "x", "temb", "table")),
    "bare": (BOTH, ("residual", "x", "temb", "weight", "bias")),
    "last": ("temb_residual", ("residual", "x", "temb", "gate_table")),
}
"""Call -> op and inputs."""
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
LARGE, SMALL, ONE = (1, 1024, 3072), (2, 12, 1280), (1, 12, 1280)
WIDTHS = (256, 1536, 2304, 4096, 5120, 7936, 8192)
LAYOUTS = ("BS", "1S", "B1", "11", "B", "1")
MIXED: tuple[tuple[DType, DType, DType, DType], ...] = (
    ("bfloat16", "float32", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("float16", "float32", "bfloat16", "float32"),
    ("float32", "bfloat16", "float16", "bfloat16"),
)
"""Dtypes of x and residual, of temb, of the tables, of weight and bias."""
NUMBERS = (
    (6, 5, 0, 1),
    (6, 0, 5, 5),
    (6, 3, 4, 2),
    (3, 2, 1, 0),
    (1, 0, 0, 0),
)
"""Slices, then the numbers of gate, shift and scale."""
USUAL = (6, 2, 3, 4)
THIN_DTYPES = ("bfloat16", "float32")
THIN_ELEMENTS = prod(SMALL)
ALTERNATING = "layout"
"""Part of the ids of rows of which thinning takes every second one."""


def grid() -> Iterator[Workload]:
    """All rows; ids name the call, the shape and whatever else is not the usual."""
    for shape, dtype, call, layout in product((LARGE, SMALL), DTYPES, CALLS, LAYOUTS):
        yield _row(call, shape, dtype, layout=layout, name=f"{ALTERNATING}.{layout}")
    for width, dtype, call in product(WIDTHS, THIN_DTYPES, CALLS):
        yield _row(call, (1, 2, width), dtype)
    for (dtype, temb, tables, parameters), call in product(MIXED, CALLS):
        name = f"temb.{temb}-tables.{tables}-parameters.{parameters}"
        yield _row(call, SMALL, dtype, temb=temb, tables=tables, parameters=parameters, name=name)
    for numbers, call in product(NUMBERS, ("first", "gated", "cross", "last")):
        yield _row(call, SMALL, "bfloat16", numbers=numbers, name="slices." + ".".join(map(str, numbers)))
    for call, (_, inputs) in CALLS.items():
        for apart in ("x", "residual", "temb", "gate_table", "table"):
            if apart in inputs:
                yield _row(call, SMALL, "bfloat16", apart=apart, name=f"part.{apart}")
        yield _row(call, ONE, "bfloat16", temb="float32", apart="slices", name="part.slices")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    inputs = [(row, row.inputs["x"]) for row in rows]
    small = [row for row, x in inputs if prod(x.shape) <= THIN_ELEMENTS and x.dtype in THIN_DTYPES]
    layouts = [row for row in small if ALTERNATING in row.id]
    return layouts[::2] + [row for row in small if ALTERNATING not in row.id]


def _row(
    call: str,
    shape: tuple[int, int, int],
    dtype: DType,
    *,
    layout: str = "BS",
    temb: DType | None = None,
    tables: DType | None = None,
    parameters: DType | None = None,
    numbers: tuple[int, int, int, int] = USUAL,
    apart: str = "",
    name: str = "",
) -> Workload:
    batch, tokens, columns = shape
    slices, gate, shift, scale = numbers
    op, inputs = CALLS[call]
    sizes = {"B": batch, "S": tokens, "1": 1}
    narrow = "float16" in (dtype, temb or dtype, tables or dtype)

    def spec(of: str) -> TensorSpec:
        if of in ("x", "residual"):
            stride = (2 * tokens * columns, 2 * columns, 1) if of == apart else None
            return TensorSpec(shape=shape, dtype=dtype, stride=stride)
        if of in ("weight", "bias"):
            return TensorSpec(shape=(columns,), dtype=parameters or dtype)
        fill: Fill = "cos" if narrow else "normal"
        line = 2 * columns * slices  # of a part: every second slice
        if of != "temb":
            stride = (line, 2 * columns, 1) if of == apart else None
            return TensorSpec(shape=(1, slices, columns), dtype=tables or dtype, stride=stride, fill=fill)
        outer = tuple(sizes[letter] for letter in layout)
        stride = (tokens * line, line, 2 * columns, 1) if of == apart else None
        if apart == "slices":
            stride = (slices * tokens * columns, columns, tokens * columns, 1)
        return TensorSpec(shape=(*outer, slices, columns), dtype=temb or dtype, stride=stride, fill=fill)

    scalars: dict[str, int | float] = {} if call == "last" else {"eps": 1e-6}
    scalars |= {"gate": gate} if "gate_table" in inputs else {}
    scalars |= {"shift": shift, "scale": scale} if "table" in inputs else {}
    parts = [call, "x".join(map(str, shape)), *([name] if name else []), dtype]
    return Workload(id="-".join(parts), op=op, inputs={of: spec(of) for of in inputs}, scalars=scalars)
