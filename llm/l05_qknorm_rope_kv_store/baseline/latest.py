"""The two kernels of SGLang 0.5.23 that the op replaces, in sequence, as a server calls them.

Import after `kda_judge.arms.upstream.activate`.
"""

import torch
from sglang.kernels.ops.attention.rope import apply_rope_inplace_with_kvcache
from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

__all__ = ["fused_inplace_qknorm_rope_kv_store"]


def fused_inplace_qknorm_rope_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
) -> None:
    """First the norm of q and k, then rope with the store."""
    fused_inplace_qknorm(q, k, q_weight, k_weight, eps, head_dim=head_dim)
    apply_rope_inplace_with_kvcache(
        q, k, v, k_cache, v_cache, cos_sin_cache, positions, out_loc, is_neox=is_neox, rope_dim=rope_dim
    )
