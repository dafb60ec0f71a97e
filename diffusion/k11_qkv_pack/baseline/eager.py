"""The op in plain PyTorch, as a model's authors would write it: the `eager` and `compile` arms."""

import torch


def qkv_norm_rope_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """RMSNorm over each head of q and k, then rotary embedding, in float32; then q, k and v in one tensor."""
    planes = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
        if cos is not None:
            c, s = cos.chunk(2, dim=-1) if sin is None else (cos, sin)
            c, s = c[: x.shape[1], None].float(), s[: x.shape[1], None].float()  # [rows, 1, head_dim / 2]
            a, b = y[:, : len(c), :, 0::2], y[:, : len(c), :, 1::2]
            turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
            y = torch.cat((turned, y[:, len(c) :]), dim=1)
        planes.append(y.to(x.dtype))
    return torch.stack((*planes, v), out=out)
