"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes: tokens {1, 8, 81, 1100} x heads {1, 8, 24, 30}, contiguous bfloat16: 16 rows.
- Layouts: tokens {4, 275} x heads {8, 9, 30} x {contiguous, packed qkv, q and k with gaps of their own} x {one
  batch; two that share the rows of cos_sin; two with rows of their own}: 54 rows.
- float16: 4 tokens x 8 heads x the three layouts: 3 rows.

Of these, upstream's kernel refuses float16 and heads with gaps; the model then norms by PyTorch's operators.

Thinning for machines without a GPU (`thin`): the rows of 4 tokens and 8 heads, 12 of 73. Tokens and heads only set how
many programs there are and how the last tile is masked; every layout, form and dtype stays. So few tokens, since there
larger sizes shrink, and two batches would then no longer have twice as many rows as one.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

OP = "rounded_qknorm_rope"
DIM = 128
TOKENS, HEADS = (1, 8, 81, 1100), (1, 8, 24, 30)
LAYOUT_TOKENS, LAYOUT_HEADS = (4, 275), (8, 9, 30)
LAYOUTS = ("", "packed", "apart")
BATCHES = ((1, False), (2, False), (2, True))
"""(Batches, whether each has rows of cos_sin of its own)."""
THIN = (LAYOUT_TOKENS[0], LAYOUT_HEADS[0])


def grid() -> Iterator[Workload]:
    """All rows; ids name tokens, heads, dtype and whatever else is not the usual."""
    for tokens, heads in product(TOKENS, HEADS):
        yield _row(tokens, heads)
    for tokens, heads, layout, (batch, own) in product(LAYOUT_TOKENS, LAYOUT_HEADS, LAYOUTS, BATCHES):
        yield _row(tokens, heads, layout, batch, own)
    for layout in LAYOUTS:
        yield _row(*THIN, layout, dtype="float16")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if row.inputs["q"].shape[1:3] == THIN]


def _row(
    tokens: int, heads: int, layout: str = "", batch: int = 1, own: bool = False, dtype: DType = "bfloat16"
) -> Workload:
    shape = (batch, tokens, heads, DIM)
    inputs = {
        name: TensorSpec(shape=shape, dtype=dtype, stride=_stride(layout, shape, number))
        for number, name in enumerate("qk")
    }
    inputs |= {name: TensorSpec(shape=(DIM,), dtype=dtype) for name in ("q_weight", "k_weight")}
    rows = batch * tokens if own else tokens
    inputs["cos_sin"] = TensorSpec(shape=(rows, DIM), dtype="float32", fill="cos_sin")
    parts = [f"{tokens}x{heads}x{DIM}", dtype, *filter(None, [layout]), *[f"b{batch}"] * (batch > 1), *["own"] * own]
    return Workload(
        id="-".join(parts),
        op=OP,
        inputs=inputs,
        outputs={name: OutputSpec(shape=shape, dtype=dtype) for name in ("q_out", "k_out")},
        scalars={"eps": 1e-5},
    )


def _stride(layout: str, shape: tuple[int, ...], number: int) -> tuple[int, ...] | None:
    """Contiguous; one of three in a token; or gaps that differ."""
    _, tokens, heads, dim = shape
    if layout == "apart":
        token = heads * (dim + 8) + 8 * number
        return (tokens * token + 8 * number, token, dim + 8, 1)
    width = 3 * heads * dim
    return (tokens * width, width, dim, 1) if layout == "packed" else None
