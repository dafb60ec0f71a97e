"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes: 16 token counts (powers of two up to 4096, and some plus one) x heads {(32, 8), (32, 4), (64, 8), (64, 4),
  (8, 8), (5, 1)} of q and of k x sizes x both pairings, bfloat16 in a packed qkv with int64 positions and slots: 576
  rows.
- Layouts: tokens {1, 9, 129, 2049} x the same heads, sizes and pairings x {int32, contiguous q, k and v with gaps
  between cache rows, different strides of heads and cache rows for each tensor}: 432 rows.
- float16, and heads that rotate in part, which upstream's pair refuses: tokens {9, 257} x (32, 8) heads x sizes x
  pairings: 24 rows.

Thinning for machines without a GPU (`thin`): the rows of 9 tokens and of (32, 8) or (5, 1) heads. Tokens and heads only
set how many programs there are and how the last tile is masked; every size, pairing, dtype and layout stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

OP = "fused_inplace_qknorm_rope_kv_store"
TOKENS = (*(2**n for n in range(13)), 9, 129, 2049)
SOME_TOKENS = (1, 9, 129, 2049)
FEW_TOKENS = (9, 257)
HEADS = ((32, 8), (32, 4), (64, 8), (64, 4), (8, 8), (5, 1))
"""Of q, and of k and v."""
DIMS = (64, 128, 256)
PARTIAL = ((128, 64), (256, 64), (256, 128))
"""(head_dim, rope_dim)."""
PAIRINGS = (False, True)
"""Interleaved and neox."""
THIN_TOKENS, THIN_HEADS = 9, ((32, 8), (5, 1))


def grid() -> Iterator[Workload]:
    """All rows; ids name the tokens, heads, sizes, pairing and whatever else is not the usual."""
    for tokens, heads, dim, neox in product(TOKENS, HEADS, DIMS, PAIRINGS):
        yield _row(tokens, heads, dim, dim, neox=neox)
    for tokens, heads, dim, neox in product(SOME_TOKENS, HEADS, DIMS, PAIRINGS):
        yield _row(tokens, heads, dim, dim, neox=neox, index="int32")
        yield _row(tokens, heads, dim, dim, neox=neox, layout="plain")
        yield _row(tokens, heads, dim, dim, neox=neox, layout="apart")
    for tokens, neox in product(FEW_TOKENS, PAIRINGS):
        for dim in DIMS:
            yield _row(tokens, HEADS[0], dim, dim, neox=neox, dtype="float16")
        for dim, rope in PARTIAL:
            yield _row(tokens, HEADS[0], dim, rope, neox=neox)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [
        row
        for row in rows
        if row.inputs["q"].shape[0] == THIN_TOKENS
        and (row.inputs["q"].shape[1], row.inputs["k"].shape[1]) in THIN_HEADS
    ]


def _row(
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    rope: int,
    *,
    neox: bool,
    layout: str = "packed",
    index: DType = "int64",
    dtype: DType = "bfloat16",
) -> Workload:
    q_heads, k_heads = heads
    # `packed`: the q, k and v heads of a token follow each other. `apart`: each head's q, k and v do, with a gap after
    # each token of k and of v, so that no stride follows from a shape or from another tensor's stride.
    stride = {
        "packed": dict.fromkeys("qkv", ((q_heads + 2 * k_heads) * dim, dim, 1)),
        "plain": dict.fromkeys("qkv"),
        "apart": {
            "q": (3 * q_heads * dim, 3 * dim, 1),
            "k": ((3 * k_heads + 1) * dim, 3 * dim, 1),
            "v": ((3 * k_heads + 2) * dim, 3 * dim, 1),
        },
    }[layout]
    # More places than tokens, so that neither a position nor a slot is simply the token's number.
    places, slots, width = 2 * tokens, 2 * tokens + 3, k_heads * dim
    gaps = {"packed": (0, 0), "plain": (16, 16), "apart": (16, 24)}[layout]
    of_k, of_v = (TensorSpec(shape=(slots, width), dtype=dtype, stride=(width + gap, 1)) for gap in gaps)
    parts = [f"{tokens}x{q_heads}x{k_heads}x{dim}", "neox" if neox else "pairs"]
    parts += [f"rope{rope}"] * (rope != dim) + [layout] * (layout != "packed")
    parts += [index] * (index != "int64") + [dtype] * (dtype != "bfloat16")
    return Workload(
        id="-".join(parts),
        op=OP,
        inplace=("q", "k", "k_cache", "v_cache"),
        inputs={
            "q": TensorSpec(shape=(tokens, q_heads, dim), dtype=dtype, stride=stride["q"]),
            "k": TensorSpec(shape=(tokens, k_heads, dim), dtype=dtype, stride=stride["k"]),
            "v": TensorSpec(shape=(tokens, k_heads, dim), dtype=dtype, stride=stride["v"]),
            "k_cache": of_k,
            "v_cache": of_v,
            "q_weight": TensorSpec(shape=(dim,), dtype=dtype),
            "k_weight": TensorSpec(shape=(dim,), dtype=dtype),
            "cos_sin_cache": TensorSpec(shape=(places, rope), dtype="float32", fill="cos_sin"),
            "positions": TensorSpec(shape=(tokens,), dtype=index, fill="randint", high=places),
            "out_loc": TensorSpec(shape=(tokens,), dtype=index, fill="slots", high=slots),
        },
        scalars={"is_neox": neox, "eps": 1e-6, "head_dim": dim, "rope_dim": rope},
    )
