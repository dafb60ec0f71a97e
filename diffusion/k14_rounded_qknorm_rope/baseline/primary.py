"""What Z-Image of SGLang 0.5.23 calls one after the other; import after `kda_judge.arms.upstream.activate`.

A kernel of the release norms q, then k: each reads a range of columns of the projection and writes a new tensor. If it
does not take both, as in float16, the model norms by PyTorch's operators. FlashInfer rotates both in place. The model's
positions are numbers that it makes once; so are they here.
"""

import torch
from sglang.kernels.ops.diffusion.norm.zimage_qk_rmsnorm_triton import zimage_qk_rmsnorm_native

__all__ = ["rounded_qknorm_rope"]

POSITIONS: dict[tuple[int, int, torch.device], torch.Tensor] = {}
"""(Rows of cos_sin, tokens of all batches, device) -> the row of each token."""


def rounded_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's norm of q and of k, then FlashInfer's rotation of both."""
    try:
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace
    except ImportError as missing:
        reason = "Z-Image's rotation needs FlashInfer, as SGLang does: expected flashinfer-python 0.7.2"
        raise ImportError(reason) from missing
    batch, tokens, heads, dim = q.shape
    numbers = (len(cos_sin), batch * tokens, q.device)
    if numbers not in POSITIONS:
        POSITIONS[numbers] = torch.arange(numbers[0], device=q.device).repeat(batch * tokens // numbers[0])
    q_out, k_out = zimage_qk_rmsnorm_native(q, q_weight, eps), zimage_qk_rmsnorm_native(k, k_weight, eps)
    if q_out is None or k_out is None:
        q_out, k_out = (
            x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight
            for x, weight in ((q.contiguous(), q_weight), (k.contiguous(), k_weight))
        )
    flat = (batch * tokens, heads * dim)
    apply_rope_with_cos_sin_cache_inplace(
        positions=POSITIONS[numbers],
        query=q_out.view(flat),
        key=k_out.view(flat),
        head_size=dim,
        cos_sin_cache=cos_sin,
        is_neox=False,
    )
    return q_out, k_out
