"""The op in plain PyTorch, as a model's authors would write it: the `eager` and `compile` arms."""

import torch


def rounded_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over each head of q and k in q's dtype, to which each operator rounds; then the rotation in float32."""
    cos, sin = cos_sin.reshape(-1, q.shape[1], 1, q.shape[3]).chunk(2, dim=-1)  # [1 or B, tokens, 1, head_dim / 2]
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
        a, b = y.float().unflatten(-1, (-1, 2)).unbind(-1)
        results.append(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype))
    return results[0], results[1]
