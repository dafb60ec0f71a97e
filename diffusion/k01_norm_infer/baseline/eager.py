"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch
from torch.nn.functional import layer_norm, rms_norm


def norm_infer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, in float32; rounded once, to the output's dtype."""
    columns = (x.shape[-1],)
    wide = x.contiguous().float()
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    if is_rms_norm:
        y = rms_norm(wide, columns, weight, eps)
        y = y if bias is None else y + bias
    else:
        y = layer_norm(wide, columns, weight, bias, eps)
    return y.to(x.dtype) if out is None else out.copy_(y)


def triton_one_pass_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension, in float32; rounded once, to x's dtype."""
    return rms_norm(x.contiguous().float(), (x.shape[-1],), w.float(), eps).to(x.dtype)
