"""The float64 oracle, the bytes that the op must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import ITEM_SIZE
from kda_judge.contract.workloads import Workload

RANKS = dict.fromkeys(("q", "k", "v"), 3) | dict.fromkeys(("k_cache", "v_cache", "cos_sin_cache"), 2)
RANKS |= dict.fromkeys(("q_weight", "k_weight", "positions", "out_loc"), 1)
"""Dimensions of each tensor argument."""


def fused_inplace_qknorm_rope_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,  # noqa: ARG001  its contents do not matter
    v_cache: torch.Tensor,  # noqa: ARG001
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,  # noqa: ARG001  the judge compares the rows that it names
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What q and k shall hold afterwards, and of each cache the rows `out_loc`, one per token; float64."""
    rope = rope_dim or cos_sin_cache.shape[-1]
    table = cos_sin_cache.double().index_select(0, positions.long())
    cos, sin = table[:, None, : rope // 2], table[:, None, rope // 2 :]
    first = torch.arange(rope // 2, device=q.device)
    if is_neox:
        second = first + rope // 2
    else:
        first = 2 * first
        second = first + 1

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        size = head_dim or wide.shape[-1]
        normed = wide / torch.sqrt(wide.pow(2).sum(dim=-1, keepdim=True) / size + eps) * weight.double()
        a, b = normed[..., first], normed[..., second]
        normed[..., first] = a * cos - b * sin
        normed[..., second] = b * cos + a * sin
        return normed

    new_q, new_k = expected(q, q_weight), expected(k, k_weight)
    return new_q, new_k, new_k.flatten(1), v.double().flatten(1)


def bytes_moved(workload: Workload) -> int:
    """Q and k read and written, v read, k and v stored; weights and indices read, and a row of angles per token."""
    inputs = workload.inputs
    tokens, _, dim = inputs["q"].shape
    places, rope = inputs["cos_sin_cache"].shape
    heads = 2 * inputs["q"].shape[1] + 5 * inputs["k"].shape[1]
    streamed = tokens * heads * dim * ITEM_SIZE[inputs["q"].dtype]
    angles = min(tokens, places) * rope * ITEM_SIZE[inputs["cos_sin_cache"].dtype]
    return streamed + angles + sum(inputs[name].nbytes for name in ("q_weight", "k_weight", "positions", "out_loc"))


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    expect(set(inputs) == set(RANKS), "inputs", str(sorted(RANKS)), sorted(inputs))
    for name, rank in RANKS.items():
        expect(len(inputs[name].shape) == rank, name, f"{rank} dimensions", list(inputs[name].shape))
    tokens, heads, dim = inputs["q"].shape
    k_heads, slots = inputs["k"].shape[1], inputs["k_cache"].shape[0]
    places, rope = inputs["cos_sin_cache"].shape
    dtype = inputs["q"].dtype
    expect(dim in (64, 128, 256), "q", "head_dim 64, 128 or 256", dim)
    expect(dtype in ("float16", "bfloat16"), "q", "dtype float16 or bfloat16", dtype)
    expect(0 < k_heads <= heads, "k", f"1 to {heads} heads", k_heads)
    shapes = {"k": (tokens, k_heads, dim), "v": (tokens, k_heads, dim), "positions": (tokens,), "out_loc": (tokens,)}
    shapes |= {"k_cache": (slots, k_heads * dim), "v_cache": (slots, k_heads * dim)}
    shapes |= {"q_weight": (dim,), "k_weight": (dim,)}
    for name, shape in shapes.items():
        expect(inputs[name].shape == shape, name, f"shape {list(shape)}", list(inputs[name].shape))
    dtypes = dict.fromkeys(("k", "v", "k_cache", "v_cache", "q_weight", "k_weight"), (dtype,))
    dtypes |= dict.fromkeys(("positions", "out_loc"), ("int32", "int64")) | {"cos_sin_cache": ("float32",)}
    for name, allowed in dtypes.items():
        expect(inputs[name].dtype in allowed, name, f"dtype {' or '.join(allowed)}", inputs[name].dtype)
    positions = inputs["positions"]
    highest = tokens if positions.fill == "arange" else positions.high or 0
    expect(highest <= places, "positions", f"values below {places}, the rows of cos_sin_cache", f"up to {highest - 1}")
    for name, size in (("head_dim", dim), ("rope_dim", rope)):
        expect(scalars.get(name, 0) in (0, size), name, f"0 or {size}", scalars[name])
    expect(isinstance(scalars.get("is_neox"), bool), "is_neox", "true or false", scalars.get("is_neox"))
    expect(0 < rope <= dim and rope % 2 == 0, "cos_sin_cache", f"an even rope_dim of at most {dim}", rope)
