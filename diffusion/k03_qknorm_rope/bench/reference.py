"""The float64 oracle, the bytes that the op must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

LANES = 32
"""Lanes of a warp. In upstream one warp has one head: a lane holds head_dim / 32 elements and rotates all or none."""
RANKS = {"q": 3, "k": 3, "q_weight": 1, "k_weight": 1, "cos_sin_cache": 2, "positions": 1}
"""Dimensions of each tensor argument."""


def fused_inplace_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What q and k shall hold afterwards, [tokens, heads, head_dim] float64; the inputs are left alone."""
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

    return expected(q, q_weight), expected(k, k_weight)


def bytes_moved(workload: Workload) -> int:
    """Q and k, read and written; weights, positions, and one row of the cache per token read."""
    inputs = workload.inputs
    tokens = inputs["q"].shape[0]
    slots = inputs["cos_sin_cache"].shape[0]
    cache = inputs["cos_sin_cache"].nbytes // max(slots, 1) * min(tokens, slots)
    streamed = 2 * (inputs["q"].nbytes + inputs["k"].nbytes)
    return streamed + cache + sum(inputs[name].nbytes for name in ("q_weight", "k_weight", "positions"))


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    expect(set(inputs) == set(RANKS), "inputs", str(sorted(RANKS)), sorted(inputs))
    for name, rank in RANKS.items():
        expect(len(inputs[name].shape) == rank, name, f"{rank} dimensions", list(inputs[name].shape))
    tokens, heads, dim = inputs["q"].shape
    k_heads = inputs["k"].shape[1]
    slots, rope = inputs["cos_sin_cache"].shape
    dtype = inputs["q"].dtype
    expect(dim in (64, 128, 256), "q", "head_dim 64, 128 or 256", dim)
    expect(dtype in ("float16", "bfloat16"), "q", "dtype float16 or bfloat16", dtype)
    expect(0 < k_heads <= heads, "k", f"1 to {heads} heads", k_heads)
    shapes = {"k": (tokens, k_heads, dim), "q_weight": (dim,), "k_weight": (dim,), "positions": (tokens,)}
    for name, shape in shapes.items():
        expect(inputs[name].shape == shape, name, f"shape {list(shape)}", list(inputs[name].shape))
    dtypes = dict.fromkeys(("k", "q_weight", "k_weight"), (dtype,))
    dtypes |= {"cos_sin_cache": ("float32",), "positions": ("int32", "int64")}
    for name, allowed in dtypes.items():
        expect(inputs[name].dtype in allowed, name, f"dtype {' or '.join(allowed)}", inputs[name].dtype)
    positions = inputs["positions"]
    highest = tokens if positions.fill == "arange" else positions.high or 0
    expect(
        highest <= slots, "positions", f"values below the {slots} rows of cos_sin_cache", f"values up to {highest - 1}"
    )
    for name, size in (("head_dim", dim), ("rope_dim", rope)):
        expect(scalars.get(name, 0) in (0, size), name, f"0 or {size}", scalars[name])
    expect(isinstance(scalars.get("is_neox"), bool), "is_neox", "true or false", scalars.get("is_neox"))
    rule = _lanes(dim, rope, bool(scalars["is_neox"]))
    expect(rule is None, "cos_sin_cache", str(rule), f"rope_dim {rope}")


def _lanes(dim: int, rope: int, is_neox: bool) -> str | None:
    """The condition of upstream's lanes on rope_dim, if this rope_dim violates it, or None."""
    width = dim // LANES
    if not 0 < rope <= dim or rope % width:
        return f"rope_dim a multiple of {width} from {width} to {dim}"
    lanes = rope // width
    if is_neox and (lanes < 2 or lanes & (lanes - 1)):
        return f"rope_dim {width} times a power of two (neox)"
    return None
