"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes: 25 token counts (powers of two up to 4096, and each plus one) x heads {8, 16, 24, 32} x (head_dim, rope_dim)
  x both pairings x int32 and int64 positions, contiguous bfloat16 with as many k heads as q heads: 2400 rows.
- Layouts: tokens {1, 9, 129, 2049} x the same heads, sizes and pairings x {a quarter of the k heads, views into a
  packed qkv, both, heads apart}: 768 rows. With heads apart, no stride can be derived from a shape. k's strides cannot
  be derived from q's either, except the one between heads, which upstream wants to be the same.
- float16: tokens {9, 257} x 8 heads x sizes x pairings: 24 rows.

Thinning for machines without a GPU (`thin`): the rows of 9 tokens and 8 heads, 84 of 3192. Tokens and heads only set
how many programs there are and how the last tile is masked, and 9 tokens of 8 heads (of 2 with a quarter) cover both;
every size, pairing, position dtype, layout and dtype stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

OP = "fused_inplace_qknorm_rope"
TOKENS = tuple(sorted({2**n + more for n in range(13) for more in (0, 1)}))
LAYOUT_TOKENS = (1, 9, 129, 2049)
FLOAT16_TOKENS = (9, 257)
HEADS = (8, 16, 24, 32)
SIZES = ((64, 64), (128, 64), (128, 128), (256, 64), (256, 128), (256, 256))
"""(head_dim, rope_dim)."""
PAIRINGS = (False, True)
"""Interleaved and neox. All sizes above have a power of two of rotary lanes, which upstream asks for with neox."""
THIN_TOKENS, THIN_HEADS = 9, 8


def grid() -> Iterator[Workload]:
    """All rows; ids name the tokens, heads, sizes, pairing and whatever else is not the usual."""
    for tokens, heads, (dim, rope), neox in product(TOKENS, HEADS, SIZES, PAIRINGS):
        for positions in ("int32", "int64"):
            yield _row(tokens, heads, heads, dim, rope, neox=neox, positions=positions)
    for tokens, heads, (dim, rope), neox in product(LAYOUT_TOKENS, HEADS, SIZES, PAIRINGS):
        yield _row(tokens, heads, heads // 4, dim, rope, neox=neox)
        yield _row(tokens, heads, heads, dim, rope, neox=neox, packed=True)
        yield _row(tokens, heads, heads // 4, dim, rope, neox=neox, packed=True)
        yield _row(tokens, heads, heads // 4, dim, rope, neox=neox, apart=True)
    for tokens, (dim, rope), neox in product(FLOAT16_TOKENS, SIZES, PAIRINGS):
        yield _row(tokens, THIN_HEADS, THIN_HEADS, dim, rope, neox=neox, dtype="float16")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if row.inputs["q"].shape[:2] == (THIN_TOKENS, THIN_HEADS)]


def _row(
    tokens: int,
    q_heads: int,
    k_heads: int,
    dim: int,
    rope: int,
    *,
    neox: bool,
    positions: DType = "int64",
    packed: bool = False,
    apart: bool = False,
    dtype: DType = "bfloat16",
) -> Workload:
    # In a packed qkv a token's q heads, k heads and v heads follow each other.
    stride = ((q_heads + 2 * k_heads) * dim, dim, 1) if packed else None
    # Each head's q, k and v side by side, with a gap after each of k's tokens.
    strides = (((3 * q_heads) * dim, 3 * dim, 1), ((3 * k_heads + 1) * dim, 3 * dim, 1)) if apart else (stride, stride)
    # Twice as many cache rows as tokens, so that positions are not simply the token's number.
    slots = 2 * tokens
    parts = [f"{tokens}x{q_heads}x{dim}", f"rope{rope}", "neox" if neox else "pairs", positions, dtype]
    parts += [f"kv{k_heads}"] * (k_heads != q_heads) + ["packed"] * packed + ["apart"] * apart
    return Workload(
        id="-".join(parts),
        op=OP,
        inplace=("q", "k"),
        inputs={
            "q": TensorSpec(shape=(tokens, q_heads, dim), dtype=dtype, stride=strides[0]),
            "k": TensorSpec(shape=(tokens, k_heads, dim), dtype=dtype, stride=strides[1]),
            "q_weight": TensorSpec(shape=(dim,), dtype=dtype),
            "k_weight": TensorSpec(shape=(dim,), dtype=dtype),
            "cos_sin_cache": TensorSpec(shape=(slots, rope), dtype="float32", fill="cos_sin"),
            "positions": TensorSpec(shape=(tokens,), dtype=positions, fill="randint", high=slots),
        },
        scalars={"is_neox": neox, "eps": 1e-6, "head_dim": dim, "rope_dim": rope},
    )
