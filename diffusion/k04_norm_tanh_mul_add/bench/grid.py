"""The regression grid: correctness-only rows over the envelope that upstream and we share.

- Shapes: [1, 1024, 3072], [4, 512, 3072] and [2, 3, 1280] x {float16, bfloat16, float32} x {layer, rms} x with and
  without weight and bias x 7 pairs of layouts (`LAYOUTS`), both ops: 504 rows.
- Widths: 256, 3840, 5120 and 8192 columns x dtypes x norms, both ops: 48 rows.
- Dtypes: float32 parameters, operands, or both beside 16-bit x, and 16-bit parameters beside float32: 16 rows.
- Half of the parameters: weight without bias (LayerNorm leaves it out too), bias without weight: 8 rows.
- Layouts of x: one of three chunks of [B, S, 3 * D]: 4 rows.
- Operands unlike each other, so that none can be read as another one: scale, shift and scale2 in three layouts and one
  of them float32 (`UNLIKE`): 8 rows; only one of them such a chunk, the others [B, S, D], both ops: 10 rows.

- Layouts that upstream refuses, as it takes three dimensions alone (`FLAT`): each for all operands, in three shapes
  (tokens are whole frames) x dtypes x norms, both ops: 180 rows; beside [B, S, D] in the smallest shape: 60 rows.

The second LayerNorm subtracts the mean of y, and scale2 multiplies what is left. Where y has a large common offset its
last digit decides y2, and a large scale2 shows the last digit of a float32 mean: correct kernels differ there by more
than the tolerance. So shift and scale2 of such rows are cosines, which have no offset in any family.

Thinning for machines without a GPU (`thin`): every fifth of the rows with at most 6 rows of x, and all of those whose
operands are unlike each other, 91 of 838. Batch and tokens only set how many programs there are, and 5 has no factor in
common with the numbers of layouts, dtypes, norms and widths, so that each of them is there.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, Fill, TensorSpec
from kda_judge.contract.workloads import Workload

SINGLE = "fused_norm_tanh_mul_add"
DOUBLE = "fused_norm_tanh_mul_add_norm_scale"
OPS = (SINGLE, DOUBLE)
NORMS = ("layer", "rms")
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
SMALL = (2, 3, 1280)
SHAPES = ((1, 1024, 3072), (4, 512, 3072), SMALL)
WIDTHS = (256, 3840, 5120, 8192)
LAYOUTS = (
    ("BSD", "BSD"),
    ("1SD", "1SD"),
    ("B1D", "B1D"),
    ("11D", "11D"),
    ("11D", "BSD"),
    ("BSD", "1SD"),
    ("1SD", "B1D"),
)
"""(scale, shift); scale2 has the layout of scale."""
FLAT = ("1", "D", "1D", "BD", "BF1D")
"""As `LAYOUTS`, for two operands or one."""
FRAMES = 3
FLAT_SHAPES = ((1, 1026, 3072), (4, 513, 3072), SMALL)
UNLIKE = (("11D", "BSD", "1SD"), ("BSD", "B1D", "11D"), ("1SD", "11D", "B1D"), ("B1D", "1SD", "BSD"))
"""(scale, shift, scale2)."""
OPERANDS = ("scale", "shift", "scale2")
OWN = "unlike"
"""Part of the ids of rows whose operands are unlike each other."""
MIXED: tuple[tuple[DType, DType, DType], ...] = (
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
)
"""Dtypes of x, of the parameters, of scale, shift and scale2. Upstream rounds a 16-bit scale's tanh to 16 bits: too
coarse for float32 outputs."""
AFFINE = ("weight", "bias")
ORDER = ("x", "weight", "bias", "scale", "shift", "weight2", "bias2", "scale2")
THIN_ROWS, THIN_STEP = 6, 5


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the norm, the shape and whatever else is not the usual."""
    for op, norm, shape, dtype in product(OPS, NORMS, SHAPES, DTYPES):
        for affine, layouts in product((AFFINE, ()), LAYOUTS):
            yield _row(op, norm, shape, dtype, affine=affine, layouts=layouts)
    yield from _flat()
    for op, norm, width, dtype in product(OPS, NORMS, WIDTHS, DTYPES):
        yield _row(op, norm, (1, 2, width), dtype)
    for op, norm, (dtype, parameters, operands) in product(OPS, NORMS, MIXED):
        yield _row(op, norm, SMALL, dtype, parameters=parameters, operands=operands)
    for op, norm, affine in product(OPS, NORMS, AFFINE):
        yield _row(op, norm, SMALL, "bfloat16", affine=(affine,))
    for op, norm in product(OPS, NORMS):
        yield _row(op, norm, SMALL, "bfloat16", chunk="x")
    for norm in NORMS:
        for number, (scale, shift, second) in enumerate(UNLIKE):
            yield _row(
                DOUBLE, norm, SMALL, "bfloat16", layouts=(scale, shift), second=second, wide=OPERANDS[number % 3]
            )
    for op, norm in product(OPS, NORMS):
        for chunk in OPERANDS if op == DOUBLE else OPERANDS[:2]:
            yield _row(op, norm, SMALL, "bfloat16", layouts=("BSD", "BSD"), chunk=chunk)


def _flat() -> Iterator[Workload]:
    for op, norm, dtype, layout in product(OPS, NORMS, DTYPES, FLAT):
        for shape in FLAT_SHAPES:
            yield _row(op, norm, shape, dtype, layouts=(layout, layout))
        yield _row(op, norm, SMALL, dtype, layouts=("BSD", layout))


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    few = [row for row in rows if prod(row.inputs["x"].shape[:-1]) <= THIN_ROWS]
    own = [row for row in few if OWN in row.id]
    return [row for row in few if OWN not in row.id][::THIN_STEP] + own


def _row(
    op: str,
    norm: str,
    shape: tuple[int, int, int],
    dtype: DType,
    *,
    affine: tuple[str, ...] = AFFINE,
    layouts: tuple[str, str] = ("11D", "BSD"),
    parameters: DType | None = None,
    operands: DType | None = None,
    second: str | None = None,
    wide: str = "",
    chunk: str = "",
) -> Workload:
    batch, tokens, columns = shape
    sizes = {"B": batch, "S": tokens, "D": columns, "F": FRAMES, "1": 1}

    def stride(of: str) -> tuple[int, ...] | None:
        return (3 * tokens * columns, 3 * columns, 1) if of == chunk else None

    def operand(of: str, layout: str, fill: Fill = "normal") -> TensorSpec:
        kind: DType = "float32" if of == wide else operands or dtype
        sized = tuple(sizes[letter] for letter in layout)
        # A fill of cosines needs positions and frequencies, which a flat operand does not have.
        return TensorSpec(shape=sized, dtype=kind, stride=stride(of), fill=fill if len(sized) > 1 else "normal")

    scale, shift = layouts
    vector = TensorSpec(shape=(columns,), dtype=parameters or dtype)
    inputs = {"x": TensorSpec(shape=shape, dtype=dtype, stride=stride("x")), **dict.fromkeys(affine, vector)}
    fill: Fill = "cos" if (op, norm) == (DOUBLE, "layer") else "normal"
    inputs |= {"scale": operand("scale", scale), "shift": operand("shift", shift, fill)}
    if op == DOUBLE:
        inputs |= {f"{name}2": vector for name in affine} | {"scale2": operand("scale2", second or scale, fill)}
    parts = ["double" if op == DOUBLE else "single", norm, "x".join(map(str, shape)), *layouts]
    parts += ["-".join(affine) or "plain"] if affine != AFFINE else []
    parts += [f"parameters.{parameters}"] if parameters else []
    parts += [f"operands.{operands}"] if operands else []
    parts += [f"{OWN}.{second}.{wide}"] if second else []
    parts += ["chunk" if chunk == "x" else f"{OWN}.chunk.{chunk}"] if chunk else []
    return Workload(
        id="-".join([*parts, dtype]),
        op=op,
        inputs={name: inputs[name] for name in ORDER if name in inputs},
        scalars={"norm_type": norm, "eps": 1e-5},
    )
