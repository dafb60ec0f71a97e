"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch


def fuse_scale_shift_kernel(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    scale_constant: float = 1.0,
    block_l: int = 128,  # noqa: ARG001  upstream's tile, which PyTorch has no use for
    block_c: int = 128,  # noqa: ARG001
) -> torch.Tensor:
    """Scale and shift in the dtypes' own arithmetic, rounded to x's dtype; two zero scalars leave x as it is."""
    scalars = all(operand.dim() < 2 and operand.numel() == 1 for operand in (scale, shift))
    y = x * (scale_constant + _per_token(scale, x)) + _per_token(shift, x)
    if scalars:
        y = torch.where((scale == 0) & (shift == 0), x, y)
    return y.to(x.dtype)


def _per_token(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The operand as a tensor that broadcasts against x."""
    if operand.dim() == 4:
        return operand.squeeze(2).repeat_interleave(x.shape[1] // operand.shape[1], dim=1)
    return operand[:, None] if operand.dim() == 2 else operand


def fuse_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm in float32, then the scale, shift and gate that each token's index chooses."""
    y, gate = _modulate(x.float(), weight, bias, (scale0, shift0, gate0), (scale1, shift1, gate1), index, eps)
    return y.to(x.dtype), gate.to(x.dtype).contiguous()


def fuse_residual_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    residual: torch.Tensor,
    residual_gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on residual + residual_gate * x, which is returned too."""
    total = residual.float() + residual_gate.float() * x.float()
    y, gate = _modulate(total, weight, bias, (scale0, shift0, gate0), (scale1, shift1, gate1), index, eps)
    return y.to(x.dtype), total.to(x.dtype), gate.to(x.dtype).contiguous()


def _modulate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    zero: tuple[torch.Tensor, ...],
    one: tuple[torch.Tensor, ...],
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    chosen = index.bool()[..., None]  # [B, L, 1]
    scale, shift, gate = (torch.where(chosen, b[:, None], a[:, None]) for a, b in zip(zero, one, strict=True))
    return normed * (1.0 + scale.float()) + shift, gate
