"""The regression grid: correctness-only rows over the ops' whole envelope.

- Shapes of `norm_infer`: batch {1, 2, 4} x sequence {6, 33, 128, 257} as rows x 512, 1024, 1536 and 3072 columns x
  three dtypes x LayerNorm with weight and bias, RMSNorm with weight: 288 rows.
- Affine: 9 and 257 rows x 512 and 1536 columns x dtypes x both norms x {weight, bias, both, neither}, and float32
  parameters beside 16-bit x: 112 rows.
- Layouts: x whose rows are apart, 9 and 257 rows x 512, 1024, 1536, 3072 columns x dtypes x both norms: 48 rows.
- Widths: 9 rows of 1, 7, 100, 130, 5120, 8192 columns and of 64 KiB x dtypes x both norms: 42 rows.
- `triton_one_pass_rms_norm`: rows {1, 2, 9, 1321, 4096, 16384} of 128 x dtypes, 9 rows of 64, 96, 100, 256, 1024, and
  three dimensions, contiguous, with gaps, and views into a packed qkv: 42 rows.

Thinning for machines without a GPU (`thin`): the rows with at most 9 rows of x, 179 of 532. Their number only sets how
many programs there are and how the last one is masked; every width, dtype, layout and form of the parameters stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import ITEM_SIZE, DType, TensorSpec
from kda_judge.contract.workloads import Workload

BATCHES, SEQUENCES, HIDDEN = (1, 2, 4), (6, 33, 128, 257), (512, 1024, 1536, 3072)
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
BOTH = ("weight", "bias")
ROWS = (9, 257)
WIDTHS = (1, 7, 100, 130, 5120, 8192)
ONE_PASS_ROWS = (1, 2, 9, 1321, 4096, 16384)
ONE_PASS_WIDTHS = (64, 96, 100, 256, 1024)
THIN_ROWS = 9


def grid() -> Iterator[Workload]:
    """All rows; ids name the shape, the dtype and whatever else is not the usual."""
    for batch, sequence, hidden, dtype, rms in product(BATCHES, SEQUENCES, HIDDEN, DTYPES, (False, True)):
        affine = ("weight",) if rms else BOTH
        yield _norm((batch * sequence, hidden), dtype, rms, affine, f"{batch}x{sequence}x{hidden}")
    for rows, hidden, rms in product(ROWS, (512, 1536), (False, True)):
        for dtype, affine in product(DTYPES, (("weight",), ("bias",), BOTH, ())):
            name = f"{rows}x{hidden}-{'-'.join(affine) or 'plain'}"
            yield _norm((rows, hidden), dtype, rms, affine, name)
        for dtype in ("float16", "bfloat16"):
            yield _norm((rows, hidden), dtype, rms, BOTH, f"{rows}x{hidden}-float32-parameters", parameters="float32")
    for rows, hidden, dtype, rms in product(ROWS, HIDDEN, DTYPES, (False, True)):
        yield _norm((rows, hidden), dtype, rms, BOTH, f"{rows}x{hidden}-apart", stride=(3 * hidden, 1))
    for dtype, rms in product(DTYPES, (False, True)):
        for width in (*WIDTHS, 65536 // ITEM_SIZE[dtype]):
            yield _norm((THIN_ROWS, width), dtype, rms, BOTH, f"{THIN_ROWS}x{width}")
    for dtype in DTYPES:
        for rows in ONE_PASS_ROWS:
            yield _one_pass((rows, 128), dtype)
        for width in ONE_PASS_WIDTHS:
            yield _one_pass((THIN_ROWS, width), dtype)
        yield _one_pass((3, 3, 128), dtype)
        yield _one_pass((3, 3, 128), dtype, "apart", (3 * 160, 160, 1))
        yield _one_pass((3, 3, 128), dtype, "packed", (9 * 128, 128, 1))


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if prod(row.inputs["x"].shape[:-1]) <= THIN_ROWS]


def _norm(
    shape: tuple[int, ...],
    dtype: DType,
    rms: bool,
    affine: tuple[str, ...],
    name: str,
    *,
    stride: tuple[int, ...] | None = None,
    parameters: DType | None = None,
) -> Workload:
    vector = TensorSpec(shape=shape[-1:], dtype=parameters or dtype)
    return Workload(
        id=f"{'rms' if rms else 'layer'}-{name}-{dtype}",
        op="norm_infer",
        inputs={"x": TensorSpec(shape=shape, dtype=dtype, stride=stride), **dict.fromkeys(affine, vector)},
        scalars={"eps": 1e-6, "is_rms_norm": rms},
    )


def _one_pass(
    shape: tuple[int, ...], dtype: DType, layout: str = "", stride: tuple[int, ...] | None = None
) -> Workload:
    parts = ["onepass", "x".join(map(str, shape)), *([layout] if layout else []), dtype]
    return Workload(
        id="-".join(parts),
        op="triton_one_pass_rms_norm",
        inputs={
            "x": TensorSpec(shape=shape, dtype=dtype, stride=stride),
            "w": TensorSpec(shape=shape[-1:], dtype=dtype),
        },
        scalars={"eps": 1e-6},
    )
