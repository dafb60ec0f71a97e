"""The regression grid: correctness-only rows over the envelope that upstream and we share.

- Shapes: [1, 1024, 3072] in 8 frames and [4, 512, 3072] in 16, and [2, 12, 1280] in 3, x {float16, bfloat16, float32} x
  {layer, rms} x with and without weight and bias x 9 layouts of scale and shift {BSD, 1, 1SD, BD, B1D, D, 1D, 11D,
  BF1D}, both ops, the gate in the next of these layouts or None: 648 rows.
- Gates: each layout and None, over [2, 12, 1280] x dtypes x norms, with scale and shift [B, S, D]: 60 rows.
- Widths: 256, 1536, 2304, 4096, 5120, 7936 and 8192 columns x dtypes x norms, both ops: 84 rows.
- Dtypes: float32 parameters, operands, or both beside 16-bit x, and the reverse, both norms and ops: 16 rows.
- Half of the parameters: weight without bias (LayerNorm leaves it out too), bias without weight, both norms: 8 rows.
- Layouts of x and residual: one of three chunks of [B, S, 3 * D], both norms and ops: 4 rows.
- Operands unlike each other, so that none can be read as another one: scale, shift and gate in three layouts and one of
  them float32 (`UNLIKE`), both norms and ops: 24 rows; only one of x, residual, scale, shift and gate such a chunk, the
  others [B, S, D], both norms; of the op without a residual only scale and shift: 14 rows.

A float16 gate is a cosine: the product of two large draws of the family `mixed` would be beyond float16.

S % F != 0 has no row, because it is refused: `tests/` has it.

Thinning for machines without a GPU (`thin`): x of at most [2, 12, 1280] in bfloat16 and float32, without half of the
layouts (alternating, so that every layout is there as scale and as gate), and all rows whose operands are unlike each
other. Batch and tokens only set how many programs there are; `tests/` has float16.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, Fill, TensorSpec
from kda_judge.contract.workloads import Workload

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
UNLIKE = (
    ("11D", "BSD", "B1D"),
    ("BSD", "BF1D", "11D"),
    ("BF1D", "1", "1SD"),
    ("1", "BD", "BSD"),
    ("B1D", "1SD", "BF1D"),
    ("1SD", "D", "1"),
)
"""(scale, shift, gate)."""
OPERANDS = ("scale", "shift", "gate")
OWN = "unlike"
"""Part of the ids of rows whose operands are unlike each other."""
AFFINE = ("weight", "bias")
ROWS = ("x", "residual")
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
        yield _row(op, norm, SMALL, "bfloat16", chunk=ROWS, name="chunk")
    for op, norm in product(OPS, NORMS):
        for number, (scale, shift, gate) in enumerate(UNLIKE):
            wide = OPERANDS[number % (3 if op == RESIDUAL else 2)]
            name = f"{OWN}.{shift}.{wide}"
            yield _row(op, norm, SMALL, "bfloat16", layout=scale, shift=shift, gate=gate, wide=wide, name=name)
        for apart in ("x", "residual", *OPERANDS) if op == RESIDUAL else ("scale", "shift"):
            yield _row(
                op, norm, SMALL, "bfloat16", layout="BSD", gate="BSD", chunk=(apart,), name=f"{OWN}.chunk.{apart}"
            )


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    inputs = [(row, row.inputs["x"]) for row in rows]
    small = [row for row, x in inputs if prod(x.shape) <= THIN_ELEMENTS and x.dtype in THIN_DTYPES]
    own = [row for row in small if OWN in row.id]
    return [row for row in small if OWN not in row.id][::2] + own


def _row(
    op: str,
    norm: str,
    shape: tuple[int, int, int],
    dtype: DType,
    *,
    affine: tuple[str, ...] = AFFINE,
    layout: str = "11D",
    shift: str | None = None,
    gate: str | None = "11D",
    parameters: DType | None = None,
    operands: DType | None = None,
    wide: str = "",
    chunk: tuple[str, ...] = (),
    name: str = "",
) -> Workload:
    batch, tokens, columns = shape
    sizes = {"B": batch, "S": tokens, "D": columns, "F": FRAMES.get(shape, 1), "1": 1}

    def stride(of: str) -> tuple[int, ...] | None:
        return (3 * tokens * columns, 3 * columns, 1) if of in chunk else None

    def operand(of: str, letters: str) -> TensorSpec:
        kind: DType = "float32" if of == wide else operands or dtype
        sized = tuple(sizes[letter] for letter in letters)
        fill: Fill = "cos" if of == "gate" and "float16" in (kind, dtype) and len(sized) > 1 else "normal"
        return TensorSpec(shape=sized, dtype=kind, stride=stride(of), fill=fill)

    rows = {of: TensorSpec(shape=shape, dtype=dtype, stride=stride(of)) for of in ROWS}
    vector = TensorSpec(shape=(columns,), dtype=parameters or dtype)
    inputs = {"x": rows["x"], **dict.fromkeys(affine, vector)}
    inputs |= {"scale": operand("scale", layout), "shift": operand("shift", shift or layout)}
    if op == RESIDUAL:
        inputs |= {"residual": rows["residual"]} | ({"gate": operand("gate", gate)} if gate else {})
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
