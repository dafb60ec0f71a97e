"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch


def apply_rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the pairs (2p, 2p + 1) of every head, in float32."""
    half = x.shape[-1] // 2
    step = 2 if interleaved and cos.shape[-1] == x.shape[-1] else 1
    # Row t of a table is for token t, which is the third dimension from the end: [tokens, 1, half].
    cos, sin = (table[: x.shape[-3], ::step][:, None, :half].float() for table in (cos, sin))
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def apply_ltx2_split_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (p, p + half) of every head; the product with cos is rounded to bfloat16 before the sum."""
    heads, half = cos.shape[1], cos.shape[3]
    a, b = x.unflatten(-1, (heads, 2, half)).unbind(-2)  # [batch, tokens, heads, half]
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    first = (a * cos).bfloat16().float() - b.float() * sin.float()
    second = (b * cos).bfloat16().float() + a.float() * sin.float()
    return torch.stack((first, second), dim=-2).flatten(-3).to(x.dtype)
