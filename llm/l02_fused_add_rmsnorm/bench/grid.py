"""The regression grid: correctness-only rows over the ops' whole envelope.

- Shapes: tokens {1, 2, 9, 64, 257, 1024, 4109} x the widths of upstream's tests and of models, 512 to 8192 and 16384,
  bfloat16, both ops: 182 rows.
- float16 and float32: tokens {9, 257} x the same widths, both ops: 104 rows.
- Widths without whole vectors: 9 rows of 1, 7, 100, 130, 1000, 2500 and 8200 columns x three dtypes, both ops: 42 rows.
- Layouts: rows with gaps between them, those of input as in a projection of three parts, 9 and 257 tokens x
  512, 1536, 2880, 4096 columns x bfloat16 and float32, both ops: 32 rows.
- Captured by the original campaign for GLM-5.2: 2, 6, 14, 38, 110, 1055, 1167 tokens of 6144, both ops: 14 rows.

Thinning for machines without a GPU (`thin`): the rows of 9 tokens, 136 of 374. The number of tokens only sets how many
programs there are and how the last one is masked; every width, dtype and layout stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

OPS = ("fused_add_rmsnorm", "rmsnorm")
TOKENS = (1, 2, 9, 64, 257, 1024, 4109)
WIDTHS = (512, 1024, 1536, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192, 16384)
ODD_WIDTHS = (1, 7, 100, 130, 1000, 2500, 8200)
APART_WIDTHS = (512, 1536, 2880, 4096)
CAPTURED = (2, 6, 14, 38, 110, 1055, 1167)
FEW = (9, 257)
THIN_TOKENS = 9


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the shape, the dtype and whatever else is not the usual."""
    for op, tokens, width in product(OPS, TOKENS, WIDTHS):
        yield _row(op, tokens, width, "bfloat16")
    for op, tokens, width, dtype in product(OPS, FEW, WIDTHS, _dtypes("float16", "float32")):
        yield _row(op, tokens, width, dtype)
    for op, width, dtype in product(OPS, ODD_WIDTHS, _dtypes("bfloat16", "float16", "float32")):
        yield _row(op, THIN_TOKENS, width, dtype)
    for op, tokens, width, dtype in product(OPS, FEW, APART_WIDTHS, _dtypes("bfloat16", "float32")):
        yield _row(op, tokens, width, dtype, gap=72)
    for op, tokens in product(OPS, CAPTURED):
        yield _row(op, tokens, 6144, "bfloat16", name="glm")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if row.inputs["input"].shape[0] == THIN_TOKENS]


def _dtypes(*names: DType) -> tuple[DType, ...]:
    return names


def _row(op: str, tokens: int, width: int, dtype: DType, gap: int = 0, name: str = "") -> Workload:
    """A row; with a gap, rows of input are as far apart as in a projection of three parts, rows of the others less."""
    shape = (tokens, width)
    x = TensorSpec(shape=shape, dtype=dtype, stride=(3 * width + gap, 1) if gap else None)
    other = TensorSpec(shape=shape, dtype=dtype, stride=(width + gap, 1) if gap else None)
    weight = TensorSpec(shape=(width,), dtype=dtype)
    add = op == "fused_add_rmsnorm"
    parts = [
        "add" if add else "norm",
        *([name] if name else []),
        f"{tokens}x{width}",
        *(["apart"] if gap else []),
        dtype,
    ]
    return Workload(
        id="-".join(parts),
        op=op,
        inplace=("input", "residual") if add else ("out",),
        inputs={"input": x, "residual": other, "weight": weight}
        if add
        else {"input": x, "weight": weight, "out": other},
        scalars={"eps": 1e-6},
    )
