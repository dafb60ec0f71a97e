"""The op in plain PyTorch, as a model's authors would write it: the `eager` and `compile` arms."""

import torch


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
    """RMSNorm over each head, then rotary embedding, in float32; written back to q and k, and k and v stored."""
    dim = head_dim or q.shape[-1]
    rope = rope_dim or cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rope / 2]
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = torch.nn.functional.rms_norm(x.float(), (dim,), weight.float(), eps)
        rotary, rest = y[..., :rope], y[..., rope:]
        if is_neox:
            a, b = rotary.chunk(2, dim=-1)
            rotary = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            rotary = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        x.copy_(torch.cat((rotary, rest), dim=-1))
    k_cache[out_loc] = k.flatten(1)
    v_cache[out_loc] = v.flatten(1)
