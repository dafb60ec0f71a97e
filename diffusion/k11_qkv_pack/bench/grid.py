"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes: tokens {1, 8, 81, 1100, 2104} x heads {8, 24, 30} x head_dim and form, contiguous bfloat16. Forms: sin behind
  cos (head_dim 64, 128 and 256), two tables as long as the tokens, two shorter ones, none (64 and 128): 135 rows.
- Layouts: tokens {9, 275} x heads {8, 9} x head_dim and form x {packed qkv, the same before an MLP's columns, each of
  the three, and of two tables one, with gaps of its own} x one or two batches: 216 rows.
- float16: 9 tokens x 8 heads x the three head_dims with sin behind cos: 3 rows.

Thinning for machines without a GPU (`thin`): the rows of 9 tokens and 8 heads, 57 of 354. Tokens and heads only set how
many programs there are and how the last tile is masked; every head_dim, form, layout and dtype stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

OP = "qkv_norm_rope_pack"
TOKENS, HEADS = (1, 8, 81, 1100, 2104), (8, 24, 30)
FORMS = tuple(product((64, 128, 256), ("cache",))) + tuple(product((64, 128), ("tables", "short", "none")))
"""(head_dim, where cos and sin are)."""
LAYOUT_TOKENS, LAYOUT_HEADS = (9, 275), (8, 9)
LAYOUTS = ("packed", "mlp", "apart")
THIN = (LAYOUT_TOKENS[0], LAYOUT_HEADS[0])


def grid() -> Iterator[Workload]:
    """All rows; ids name tokens, heads, head_dim, form and whatever else is not the usual."""
    for tokens, heads, (dim, form) in product(TOKENS, HEADS, FORMS):
        yield _row(tokens, heads, dim, form)
    for tokens, heads, (dim, form), layout in product(LAYOUT_TOKENS, LAYOUT_HEADS, FORMS, LAYOUTS):
        for batch in (1, 2):
            yield _row(tokens, heads, dim, form, layout, batch)
    for dim in (64, 128, 256):
        yield _row(*THIN, dim, "cache", dtype="float16")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if row.inputs["q"].shape[1:3] == THIN]


def _row(
    tokens: int, heads: int, dim: int, form: str, layout: str = "", batch: int = 1, dtype: DType = "bfloat16"
) -> Workload:
    shape = (batch, tokens, heads, dim)
    inputs = {
        name: TensorSpec(shape=shape, dtype=dtype, stride=_stride(layout, shape, number))
        for number, name in enumerate("qkv")
    }
    inputs |= {name: TensorSpec(shape=(dim,), dtype=dtype) for name in ("q_weight", "k_weight")}
    if form == "cache":
        inputs["cos"] = TensorSpec(shape=(tokens, dim), dtype="float32", fill="cos_sin")
    elif form != "none":
        rows = (tokens + 1) // 2 if form == "short" else tokens
        gaps = (dim // 2 + 8, 1) if layout == "apart" else None
        inputs["cos"] = TensorSpec(shape=(rows, dim // 2), dtype="float32", fill="cos", stride=gaps)
        inputs["sin"] = TensorSpec(shape=(rows, dim // 2), dtype="float32", fill="sin")
    parts = [f"{tokens}x{heads}x{dim}", form, dtype, *filter(None, [layout]), *[f"b{batch}"] * (batch > 1)]
    return Workload(
        id="-".join(parts),
        op=OP,
        inputs=inputs,
        outputs={"y": OutputSpec(shape=(3, *shape), dtype=dtype)},
        scalars={"eps": 1e-6},
    )


def _stride(layout: str, shape: tuple[int, ...], number: int) -> tuple[int, ...] | None:
    """Contiguous; one of three in a token; the same before four times as many columns; or gaps that differ."""
    _, tokens, heads, dim = shape
    if layout == "apart":
        token = heads * (dim + 8) + 8 * number
        return (tokens * token + 8 * number, token, dim + 8, 1)
    width = {"packed": 3, "mlp": 7}.get(layout, 0) * heads * dim
    return (tokens * width, width, dim, 1) if width else None
