"""The regression grid: correctness-only rows over both ops' whole envelope.

apply_rotary_embedding, bfloat16 x [1, tokens, heads, dim] and float32 tables where nothing else is said:

- Shapes: 14 token counts (powers of two up to 2048, 129, 2049) x head counts of q and k for kv heads {1, 2, 8} x GQA
  {1, 4, 8} (the op takes one of the two at a time) x dims {64, 128, 256, 512} x interleaved both ways, with the tables
  that each way is for (every angle twice, or once): 784 rows.
- Layouts: tokens {9, 129} x heads {3, 8, 33} x dims {6, 96, 128} x {no batch, batch 2, a view into a packed qkv, such a
  view in a batch of 2, rows of the tables apart and more of them than tokens, tables as wide as the head without
  interleaved, tables half as wide with it, rows of sin apart and those of cos not, rows of cos apart and those of sin
  not}: 162 rows.
- Dtypes: tokens {9, 257} x heads {3, 8} x dims {64, 96, 128} x interleaved both ways x {float16 and float32 x; bfloat16
  x and tables; float16 x and tables; float32 x and bfloat16 tables}: 120 rows.

apply_ltx2_split_rotary_emb:

- Shapes: (batch, tokens) {(1, 1), (1, 9), (1, 126), (2, 126), (1, 1537), (2, 1536)} x (heads, half) {(32, 32),
  (32, 64), (8, 64), (3, 32), (33, 64), (5, 20), (1, 3)} x bfloat16 tables {a view of [batch, tokens, heads, half],
  contiguous}: 84 rows.
- The shapes of the frozen rows (`PRODUCTION`) in float16, and in both dtypes with contiguous tables: 31 rows.
- Dtypes and layouts: (1, 9), (2, 126) x (32, 32), (3, 64), (5, 20) x {float16, float32; bfloat16 and float16 x with
  float32 tables; one table for all batches; one of cos and sin contiguous, the other a view of [batch, tokens, heads,
  half] with gaps, so that batches, heads and tokens are at other distances}: 42 rows.

Where cos and sin have different layouts, their values are N(0, 1), independent for every batch, head and token. In all
other rows the angles are the same for all batches, and along the shorter of heads and tokens, so that a kernel which
reads a wrong line of the table there still finds the right values.

Layouts that upstream reads wrongly (LTX2's x with gaps) or answers with permuted strides are in `tests/`.

Thinning for machines without a GPU (`thin`): rows of 9 tokens (8 where counts are powers of two, 126 in LTX2's batches
of 2) and 3, 5 or 32 heads, 138 of 1223. Tokens and heads only set how many programs there are and how the last tile
is masked; every dim, layout and dtype stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Literal

from kda_judge.contract.tensor_spec import DType, Fill, TensorSpec
from kda_judge.contract.workloads import Workload

Table = Literal["cos", "sin"]

TOKENS = tuple(sorted({2**n for n in range(12)} | {129, 2049}))
HEADS = tuple(sorted({kv * group for kv in (1, 2, 8) for group in (1, 4, 8)}))
DIMS = (64, 128, 256, 512)
LAYOUTS = ("no-batch", "batch2", "packed", "packed-batch2", "long-tables", "wide-tables", "narrow-tables")
UNLIKE = ("sin-apart", "cos-apart")
"""Layouts in which only the named table has gaps. The values of both tables have no pattern."""
X_AND_TABLES: tuple[tuple[DType, DType], ...] = (
    ("float16", "float32"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
)
SEQUENCES = ((1, 1), (1, 9), (1, 126), (2, 126), (1, 1537), (2, 1536))
"""(batch, tokens) of LTX2."""
PRODUCTION = ((1, 126), (2, 126), (1, 1536), (1, 6144), (2, 6144), (1, 24576))
"""(batch, tokens) of LTX2's frozen rows, each with 32 heads of 32 or 64 in a half."""
HEADS_AND_HALVES = ((32, 32), (32, 64), (8, 64), (3, 32), (33, 64), (5, 20), (1, 3))
"""(heads, half) of LTX2."""
LTX2_X_AND_TABLES: tuple[tuple[DType, DType], ...] = (
    ("float16", "float16"),
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
)
THIN_TOKENS, THIN_HEADS = (8, 9, 126), (3, 5, 32)


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the sizes, and whatever else is not the usual."""
    for tokens, heads, dim, twice in product(TOKENS, HEADS, DIMS, (False, True)):
        yield _pairs(tokens, heads, dim, interleaved=twice)
    for tokens, heads, dim, layout in product((9, 129), (3, 8, 33), (6, 96, 128), LAYOUTS + UNLIKE):
        yield _pairs(tokens, heads, dim, interleaved=layout == "narrow-tables", layout=layout)
    for tokens, heads, dim, twice in product((9, 257), (3, 8), (64, 96, 128), (False, True)):
        for dtype, table in X_AND_TABLES:
            yield _pairs(tokens, heads, dim, interleaved=twice, dtype=dtype, table=table)
    for (batch, tokens), (heads, half), layout in product(SEQUENCES, HEADS_AND_HALVES, ("view", "contiguous")):
        yield _halves(batch, tokens, heads, half, layout=layout)
    for (batch, tokens), half, layout in product(PRODUCTION, (32, 64), ("view", "contiguous")):
        if layout == "contiguous" and (batch, tokens) not in SEQUENCES:
            yield _halves(batch, tokens, 32, half, layout=layout)
        if (batch, tokens, half, layout) != (2, 126, 32, "view"):  # which is among the dtypes below
            yield _halves(batch, tokens, 32, half, layout=layout, dtype="float16", table="float16")
    for (batch, tokens), (heads, half) in product(((1, 9), (2, 126)), ((32, 32), (3, 64), (5, 20))):
        for dtype, table in LTX2_X_AND_TABLES:
            yield _halves(batch, tokens, heads, half, dtype=dtype, table=table)
        for layout in ("shared", *UNLIKE):
            yield _halves(batch, tokens, heads, half, layout=layout)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if _is_thin(row)]


def _is_thin(row: Workload) -> bool:
    if row.op == "apply_rotary_embedding":
        tokens, heads, _ = row.inputs["x"].shape[-3:]
    else:
        _, heads, tokens, _ = row.inputs["cos"].shape
    return tokens in THIN_TOKENS and heads in THIN_HEADS


def _fill(name: Table, layout: str) -> Fill:
    return "normal" if layout in UNLIKE else name


def _pairs(
    tokens: int,
    heads: int,
    dim: int,
    *,
    interleaved: bool,
    layout: str = "",
    dtype: DType = "bfloat16",
    table: DType = "float32",
) -> Workload:
    shape: tuple[int, ...] = (1, tokens, heads, dim)
    stride: tuple[int, ...] | None = None
    packed = 3 * heads * dim  # elements of a token's q, k and v
    if layout == "no-batch":
        shape = shape[1:]
    elif layout == "batch2":
        shape = (2, tokens, heads, dim)
    elif layout == "packed":
        stride = (tokens * packed, packed, dim, 1)
    elif layout == "packed-batch2":
        shape, stride = (2, tokens, heads, dim), (tokens * packed, packed, dim, 1)
    columns = dim if layout == "wide-tables" or (interleaved and layout != "narrow-tables") else dim // 2
    rows = 2 * tokens if layout == "long-tables" else tokens

    def angles(name: Table) -> TensorSpec:
        apart = layout in ("long-tables", f"{name}-apart")
        stride = (columns + 8 * apart, 1)
        return TensorSpec(shape=(rows, columns), dtype=table, stride=stride, fill=_fill(name, layout))

    parts = [
        f"{tokens}x{heads}x{dim}",
        "twice" if interleaved else "once",
        dtype,
        *[f"tables-{table}"] * (table != "float32"),
    ]
    return Workload(
        id="-".join(parts + [layout] * bool(layout)),
        op="apply_rotary_embedding",
        inputs={
            "x": TensorSpec(shape=shape, dtype=dtype, stride=stride),
            "cos": angles("cos"),
            "sin": angles("sin"),
        },
        scalars={"interleaved": interleaved},
    )


def _halves(
    batch: int,
    tokens: int,
    heads: int,
    half: int,
    *,
    layout: str = "view",
    dtype: DType = "bfloat16",
    table: DType = "bfloat16",
) -> Workload:
    inner = heads * 2 * half
    size = half + 8 * (layout in UNLIKE)
    view = (0 if layout == "shared" else tokens * heads * size, size, heads * size, 1)

    def angles(name: Table) -> TensorSpec:
        stride = None if layout == "contiguous" or (layout in UNLIKE and layout != f"{name}-apart") else view
        return TensorSpec(shape=(batch, heads, tokens, half), dtype=table, stride=stride, fill=_fill(name, layout))

    parts = [f"ltx2-{batch}x{tokens}x{heads}x{2 * half}", layout, dtype, *[f"tables-{table}"] * (table != dtype)]
    return Workload(
        id="-".join(parts),
        op="apply_ltx2_split_rotary_emb",
        inputs={
            "x": TensorSpec(shape=(batch, tokens, inner), dtype=dtype),
            "cos": angles("cos"),
            "sin": angles("sin"),
        },
    )
