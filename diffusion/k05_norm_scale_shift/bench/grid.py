"""The regression grid: correctness-only rows over the envelope that upstream and we share.

- Shapes: [1, 1024, 3072] in 8 frames and [4, 512, 3072] in 16, and [2, 12, 1280] in 3, x {float16, bfloat16, float32} x
  {layer, rms} x with and without weight and bias x 9 layouts of scale and shift {BSD, 1, 1SD, BD, B1D, D, 1D, 11D,
  BF1D}, both ops, the gate in the layout behind it or None: 648 rows.
- Gates: each layout and None, over [2, 12, 1280] x dtypes x norms, with scale and shift [B, S, D]: 60 rows.
- Widths: 256, 1536, 2304, 4096, 5120, 7936 and 8192 columns x dtypes x norms, both ops: 84 rows.
- Dtypes: float32 parameters, operands, or both beside 16-bit x, and the reverse, both norms and ops: 16 rows.
- Half of the parameters: weight without bias (LayerNorm leaves it out too), bias without weight, both norms: 8 rows.
- Layouts of x and residual: one of three chunks of [B, S, 3 * D], both norms and ops: 4 rows.

A float16 gate is a cosine: the product of two large draws of the family `mixed` would be beyond float16.

S % F != 0 has no row, because it is refused: `tests/` has it.

Thinning for machines without a GPU (`thin`): x of at most [2, 12, 1280] in bfloat16 and float32, without half of the
layouts (alternating, so that every layout is there as scale and as gate). Batch and tokens only set how many programs
there are; `tests/` has float16.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_core.workloads import DType, TensorSpec, Workload

SINGLE = "fused_norm_scale_shift"
RESIDUAL = "fused_scale_residual_norm_scale_shift"
OPS = (SINGLE, RESIDUAL)
NORMS = ("layer", "rms")
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
SMALL = (2, 12, 1280)
FRAMES = {(1, 1024, 3072): 8, (4, 512, 3072): 16, SMALL: 3}
WIDTHS = (256, 1536, 2304, 4096, 5120, 7936, 8192)
LAYOUTS = ("BSD", "1", "1SD", "BD", "B1D", "D", "1D", "11D", "BF1D")
MIXED: tuple[tuple[DType, DType, DType], ...] = (
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float32", "float32"),
    ("float32", "bfloat16", "float16"),
)
"""Dtypes of x, of the parameters, of gate, scale and shift."""
AFFINE = ("weight", "bias")
ORDER = ("residual", "x", "gate", "weight", "bias", "scale", "shift")
THIN_DTYPES = ("bfloat16", "float32")
THIN_ELEMENTS = prod(SMALL)


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the norm, the shape and whatever else is not the usual."""
    for op, norm, shape, dtype in product(OPS, NORMS, FRAMES, DTYPES):
        for number, (affine, layout) in enumerate(product((AFFINE, ()), LAYOUTS)):
            gate = (*LAYOUTS, None)[(number + 1) % 10]
            yield _row(op, norm, shape, dtype, affine=affine, layout=layout, gate=gate)
    for norm, dtype, gate in product(NORMS, DTYPES, (*LAYOUTS, None)):
        yield _row(RESIDUAL, norm, SMALL, dtype, layout="BSD", gate=gate, affine=AFFINE[:0], name="gates")
    for op, norm, width, dtype in product(OPS, NORMS, WIDTHS, DTYPES):
        yield _row(op, norm, (1, 2, width), dtype)
    for op, norm, (dtype, parameters, operands) in product(OPS, NORMS, MIXED):
        yield _row(op, norm, SMALL, dtype, parameters=parameters, operands=operands)
    for op, norm, affine in product(OPS, NORMS, AFFINE):
        yield _row(op, norm, SMALL, "bfloat16", affine=(affine,), name=f"only-{affine}")
    for op, norm in product(OPS, NORMS):
        yield _row(op, norm, SMALL, "bfloat16", chunk=True, name="chunk")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    inputs = [(row, row.inputs["x"]) for row in rows]
    small = [row for row, x in inputs if prod(x.shape) <= THIN_ELEMENTS and x.dtype in THIN_DTYPES]
    return small[::2]


def _row(
    op: str,
    norm: str,
    shape: tuple[int, int, int],
    dtype: DType,
    *,
    affine: tuple[str, ...] = AFFINE,
    layout: str = "11D",
    gate: str | None = "11D",
    parameters: DType | None = None,
    operands: DType | None = None,
    chunk: bool = False,
    name: str = "",
) -> Workload:
    batch, tokens, columns = shape
    sizes = {"B": batch, "S": tokens, "D": columns, "F": FRAMES.get(shape, 1), "1": 1}

    def operand(letters: str, *, bounded: bool = False) -> TensorSpec:
        kind = operands or dtype
        sized = tuple(sizes[letter] for letter in letters)
        fill = "cos" if bounded and "float16" in (kind, dtype) and len(sized) > 1 else "normal"
        return TensorSpec(shape=sized, dtype=kind, fill=fill)

    stride = (3 * tokens * columns, 3 * columns, 1) if chunk else None
    rows = TensorSpec(shape=shape, dtype=dtype, stride=stride)
    vector = TensorSpec(shape=(columns,), dtype=parameters or dtype)
    inputs = {"x": rows, **dict.fromkeys(affine, vector), "scale": operand(layout), "shift": operand(layout)}
    if op == RESIDUAL:
        inputs |= {"residual": rows} | ({"gate": operand(gate, bounded=True)} if gate else {})
    parts = ["sum" if op == RESIDUAL else "norm", norm, "x".join(map(str, shape)), layout]
    parts += [f"gate.{gate}"] if op == RESIDUAL else []
    parts += [] if affine else ["plain"]
    parts += [f"parameters.{parameters}"] if parameters else []
    parts += [f"operands.{operands}"] if operands else []
    parts += [name] if name else []
    return Workload(
        id="-".join([*parts, dtype]),
        op=op,
        inputs={key: inputs[key] for key in ORDER if key in inputs},
        scalars={"norm_type": norm, "eps": 1e-5},
    )
