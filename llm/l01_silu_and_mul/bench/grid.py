"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes of upstream's tests: 7 x 16, 83 x 1024, 3 x 5 x 16, 2 x 3 x 512, 1 x 17 x 4096, {1, 4, 16, ..., 16384} x 2048
  and {1, 4, 16} x 65536 x three dtypes: 48 rows.
- Widths of y of models: {1, 9, 83, 257, 2049} rows x 192, 256, 384, 512, 768, 1536, 2048, 3072, 10944, 12288, 14336,
  25600, 28672, bfloat16 and float16: 130 rows.
- Widths without whole vectors: {1, 9} rows x 1, 7, 50, 65, 100, 1368, 2500, 4097 x three dtypes: 48 rows.
- Gaps between rows, and dimensions in another order: 9 rows x 192, 768, 12288 x three dtypes: 18 rows.

Thinning for machines without a GPU (`thin`): calls with at most 16 rows and 16384 columns of y, 128 of 244. More rows
would only be more programs that do the same. Every dtype, layout and width up to there stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
OF_UPSTREAM = (
    (7, 16),
    (83, 1024),
    (3, 5, 16),
    (2, 3, 512),
    (1, 17, 4096),
    *((4**exponent, 2048) for exponent in range(8)),
    *((4**exponent, 65536) for exponent in range(3)),
)
ROWS = (1, 9, 83, 257, 2049)
WIDTHS = (192, 256, 384, 512, 768, 1536, 2048, 3072, 10944, 12288, 14336, 25600, 28672)
ODD_WIDTHS = (1, 7, 50, 65, 100, 1368, 2500, 4097)
APART = (192, 768, 12288)
THIN_ROWS, THIN_WIDTH = 16, 16384


def grid() -> Iterator[Workload]:
    """All rows; ids name the shape of y, the dtype and whatever else is not the usual."""
    for (*outer, columns), dtype in product(OF_UPSTREAM, DTYPES):
        yield _row((*outer, columns // 2), dtype, "tested")
    for rows, width, dtype in product(ROWS, WIDTHS, DTYPES[:2]):
        yield _row((rows, width), dtype)
    for rows, width, dtype in product((1, 9), ODD_WIDTHS, DTYPES):
        yield _row((rows, width), dtype)
    for width, dtype in product(APART, DTYPES):
        yield _row((9, width), dtype, "apart", (2 * width + 8, 1))
        yield _row((3, 3, width), dtype, "turned", (2 * width, 6 * width, 1))


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    shapes = ((row, row.outputs["y"].shape) for row in rows)
    return [row for row, shape in shapes if prod(shape[:-1]) <= THIN_ROWS and shape[-1] <= THIN_WIDTH]


def _row(shape: tuple[int, ...], dtype: DType, name: str = "", stride: tuple[int, ...] | None = None) -> Workload:
    parts = ["x".join(map(str, shape)), *([name] if name else []), dtype]
    return Workload(
        id="-".join(parts),
        op="silu_and_mul",
        inputs={"input": TensorSpec(shape=(*shape[:-1], 2 * shape[-1]), dtype=dtype, stride=stride)},
        outputs={"y": OutputSpec(shape=shape, dtype=dtype)},
    )
