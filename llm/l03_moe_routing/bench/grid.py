"""The regression grid: correctness-only rows over the ops' whole envelope.

Top-k: tokens {1, 9, 257} x experts {4, 8, 60, 128, 256, 512} with their k x dtypes, renormalised or not; softcapping
and a correction bias. Alignment: tokens {1, 9, 257, 4100} x experts as above x blocks {16, 64, 7}; ids of 64 bits, ids
-1 and ids outside the range; every flag. Sum: tokens {1, 9, 257} x k {1, 4, 6, 8} x widths {8,
2048, 2880, 7168} x dtypes. Thinning for machines without a GPU (`thin`): up to 9 tokens for the alignment and in
bfloat16, else 1: these cover every form.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Scalar, Workload

TOKENS = (1, 9, 257)
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
EXPERTS = ((4, 2), (8, 1), (60, 4), (60, 6), (128, 4), (128, 8), (256, 8), (512, 10))
"""(experts, k)."""
WIDTHS = ((1, 8), (4, 2880), (6, 2048), (8, 2048), (8, 7168))
"""(k, columns)."""
THIN_TOKENS = 9
WRITTEN = "every element of the outputs is written, and none is read"


def grid() -> Iterator[Workload]:
    """All rows; ids name the op, the shape, and what is not usual."""
    for tokens, (experts, k), dtype in product(TOKENS, EXPERTS, DTYPES):
        yield _topk(tokens, experts, k, dtype, renormalize=tokens != 9)
    for tokens, dtype in product(TOKENS, DTYPES):
        yield _topk(tokens, 128, 8, dtype, renormalize=True, bias=True)
        yield _topk(tokens, 60, 4, dtype, renormalize=False, moe_softcapping=30.0)
        yield _topk(tokens, 256, 10, dtype, renormalize=True, bias=True, moe_softcapping=5.0)
    for tokens, (experts, k), block in product((*TOKENS, 4100), EXPERTS, (16, 64, 7)):
        yield _align(tokens, k, experts, block, pad_sorted_token_ids=True)
    for tokens in (*TOKENS, 4100):
        yield _align(tokens, 8, 128, 16, dtype="int64", pad_sorted_token_ids=True)
        yield _align(tokens, 8, 128, 16)
        yield _align(tokens, 8, 128, 16, low=-1, pad_sorted_token_ids=True, write_inactive_prefix_count=True)
        yield _align(tokens, 8, 128, 64, pad_expert_ids=True, pad_sorted_token_ids=True)
        for dtype in ("int32", "int64"):
            yield _align(tokens, 8, 32, 16, dtype, low=-40, map_invalid_experts_to_sentinel=True)
    for tokens, (k, width), dtype in product(TOKENS, WIDTHS, DTYPES):
        x = TensorSpec(shape=(tokens, k, width), dtype=dtype)
        yield _row("moe_topk_sum", f"{tokens}x{k}x{width}-{dtype}", ("out",), {}, x=x, out=_like(tokens, width, dtype))


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if next(iter(row.inputs.values())).shape[0] <= _most(row)]


def _most(row: Workload) -> int:
    """Most tokens of a row that a machine without a GPU checks: the interpreter takes a second for nine."""
    usual = any(spec.dtype == "bfloat16" for spec in row.inputs.values()) or row.op == "moe_align_block_size"
    return THIN_TOKENS if usual else 1


def _topk(tokens: int, experts: int, k: int, dtype: DType, bias: bool = False, **scalars: Scalar) -> Workload:
    inputs = {
        "topk_weights": _like(tokens, k, "float32"),
        "topk_ids": TensorSpec(shape=(tokens, k), dtype="int32", fill="randint", high=2),
        "gating_output": _like(tokens, experts, dtype),
    }
    if bias:
        inputs["correction_bias"] = TensorSpec(shape=(experts,), dtype="float32")
    words = [f"{tokens}x{experts}-{k}-{dtype}", *(f"{name}-{value}" for name, value in scalars.items())]
    return _row("topk_softmax", "-".join([*words, *["bias"] * bias]), ("topk_weights", "topk_ids"), scalars, **inputs)


def _align(
    tokens: int, k: int, experts: int, block: int, dtype: DType = "int32", low: int = 0, **flags: bool
) -> Workload:
    pairs = tokens * k
    most = min(pairs * block, pairs + (experts + 1) * (block - 1))
    most = -(-most // 4) * 4  # as SGLang allocates
    fill = {"fill": "randint", "low": low, "high": experts + 40} if low < -1 else {"fill": "randint", "low": low}
    ids = TensorSpec(shape=(tokens, k), dtype=dtype, **{"high": experts, **fill})  # type: ignore[arg-type]
    if low == 0:
        ids = TensorSpec(shape=(tokens, k), dtype=dtype, fill="expert_ids", high=experts)
    sizes = {
        "sorted_token_ids": most,
        "expert_ids": -(-most // block),
        "num_tokens_post_pad": 1 + bool(flags.get("write_inactive_prefix_count")),
        "cumsum_buffer": experts + 2,
    }
    buffers = {name: TensorSpec(shape=(size,), dtype="int32", fill="randint", high=2) for name, size in sizes.items()}
    scalars: dict[str, Scalar] = {"num_experts": experts + 1, "block_size": block, **flags}
    words = "-".join([f"{tokens}x{k}-of-{experts}-by-{block}", dtype, f"from-{low}" if low else "", *flags])
    return _row("moe_align_block_size", words.replace("--", "-"), tuple(sizes), scalars, topk_ids=ids, **buffers)


def _like(rows: int, columns: int, dtype: DType) -> TensorSpec:
    return TensorSpec(shape=(rows, columns), dtype=dtype)


def _row(op: str, words: str, written: tuple[str, ...], scalars: dict[str, Scalar], **inputs: TensorSpec) -> Workload:
    return Workload(id=f"{op}-{words}", op=op, inplace=written, loop=WRITTEN, inputs=inputs, scalars=scalars)
