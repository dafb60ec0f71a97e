"""The regression grid: correctness-only rows over the ops' whole envelope.

- Tokens {1, 2, 9, 64, 257, 1024, 4109} x columns of models, 1536 to 25600, bfloat16, scales column by column, both ops:
  126 rows.
- float16 and float32: tokens {9, 257} x 2048 and 7168 columns, both ops: 16 rows.
- Groups of 16, 32, 64 and 256: 9 tokens x 2048 columns x three dtypes x scales by row and by column, both ops: 48 rows.
- Odd numbers of groups, and fewer than a program takes: 9 tokens x 128, 384, 896, 1408, 6016 columns, scales by row and
  by column, both ops: 20 rows.
- Gaps between rows of input and of output_q: {9, 257} tokens x 384, 2048 columns x bfloat16 and float32, both
  ops: 16 rows.
- Captured by the original campaign for GLM-5.2: 2, 6, 14, 38, 110, 1055, 1167 tokens of 6144 columns, both ops: 14
  rows.

Thinning for machines without a GPU (`thin`): the rows of 9 tokens with at most 7168 columns, 98 of 240. The number of
tokens only sets how many programs there are and how the last one is masked; every dtype, group and layout stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

OPS = ("per_token_group_quant", "silu_and_mul_quant")
TOKENS = (1, 2, 9, 64, 257, 1024, 4109)
WIDTHS = (1536, 2048, 2304, 4096, 5120, 6144, 7168, 12288, 25600)
ODD_WIDTHS = (128, 384, 896, 1408, 6016)
CAPTURED = (2, 6, 14, 38, 110, 1055, 1167)
OTHERS: tuple[DType, ...] = ("float16", "float32")
ALL: tuple[DType, ...] = ("bfloat16", *OTHERS)
APART: tuple[DType, ...] = ("bfloat16", "float32")
FEW = (9, 257)
THIN_TOKENS, THIN_WIDTH = 9, 7168


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the shape of output_q, the dtype and whatever else is not the usual."""
    for op, tokens, width in product(OPS, TOKENS, WIDTHS):
        yield row(op, tokens, width)
    for op, tokens, width, dtype in product(OPS, FEW, (2048, 7168), OTHERS):
        yield row(op, tokens, width, dtype)
    for op, group, dtype, columns in product(OPS, (16, 32, 64, 256), ALL, (False, True)):
        yield row(op, THIN_TOKENS, 2048, dtype, columns, group)
    for op, width, columns in product(OPS, ODD_WIDTHS, (False, True)):
        yield row(op, THIN_TOKENS, width, "bfloat16", columns)
    for op, tokens, width, dtype in product(OPS, FEW, (384, 2048), APART):
        yield row(op, tokens, width, dtype, gap=64)
    for op, tokens in product(OPS, CAPTURED):
        yield row(op, tokens, 6144, name="glm")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    shapes = ((one, one.inputs["output_q"].shape) for one in rows)
    return [one for one, (tokens, width) in shapes if tokens == THIN_TOKENS and width <= THIN_WIDTH]


def row(
    op: str,
    tokens: int,
    width: int,
    dtype: DType = "bfloat16",
    columns: bool = True,
    group: int = 128,
    gap: int = 0,
    name: str = "",
) -> Workload:
    """A row; with a gap, rows of input and output_q lie that much further apart."""
    wide = width * (2 if op == "silu_and_mul_quant" else 1)
    groups = width // group
    parts = [
        "silu" if wide > width else "quant",
        *([name] if name else []),
        f"{tokens}x{width}",
        *([f"by{group}"] if group != 128 else []),
        *([] if columns else ["rows"]),
        *(["apart"] if gap else []),
        dtype,
    ]
    return Workload(
        id="-".join(parts),
        op=op,
        inplace=("output_q", "output_s"),
        inputs={
            "input": TensorSpec(shape=(tokens, wide), dtype=dtype, stride=(wide + gap, 1) if gap else None),
            "output_q": TensorSpec(
                shape=(tokens, width), dtype="float8_e4m3fn", stride=(width + gap // 2, 1) if gap else None
            ),
            "output_s": TensorSpec(
                shape=(tokens, groups), dtype="float32", stride=(1, (tokens + 3) // 4 * 4) if columns else None
            ),
        },
        scalars={"group_size": group},
    )
