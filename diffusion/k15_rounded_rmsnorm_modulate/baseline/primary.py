"""What LTX-2 of SGLang 0.5.23 calls one after the other; import after `kda_judge.arms.upstream.activate`.

A kernel of the release adds x * gate to the residual; without a gate the model adds by PyTorch. Then PyTorch's RMSNorm,
with autocast off. Then another kernel of the release for each modulation. It takes operands [B, D] without gaps, so the
model copies the rows where they lie apart. Where a kernel does not take a call, the model has PyTorch's operators.
"""

import torch
from sglang.kernels.kda_kernels.residual_gate_add_jit import residual_gate_add
from sglang.kernels.ops.diffusion.modulate.modulate_scale_shift_jit import (
    can_use_modulate_scale_shift_cuda,
    modulate_scale_shift_cuda,
)

__all__ = [
    "rounded_residual_rmsnorm_modulate",
    "rounded_residual_rmsnorm_modulate2",
    "rounded_rmsnorm_modulate",
]


def rounded_rmsnorm_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """PyTorch's norm, then upstream's modulation."""
    return _modulated(_normed(x, eps), scale, shift)


def rounded_residual_rmsnorm_modulate(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's sum, PyTorch's norm, and a modulation if there is one."""
    h = _added(residual, x, gate)
    n = _normed(h, eps)
    return (n if scale is None or shift is None else _modulated(n, scale, shift)), h


def rounded_residual_rmsnorm_modulate2(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    other_scale: torch.Tensor,
    other_shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Upstream's sum, PyTorch's norm, and two modulations of it."""
    h = _added(residual, x, gate)
    n = _normed(h, eps)
    return _modulated(n, scale, shift), _modulated(n, other_scale, other_shift), h


def _added(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    return residual + x if gate is None else residual_gate_add(residual, x, gate)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    with torch.autocast(device_type="cuda", enabled=False):
        return torch.nn.functional.rms_norm(x, normalized_shape=(x.shape[-1],), eps=eps)


def _modulated(n: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    scales, shifts = scale.squeeze(1).contiguous(), shift.squeeze(1).contiguous()
    if can_use_modulate_scale_shift_cuda(n, scales, shifts):
        return modulate_scale_shift_cuda(n, scales, shifts)
    return n * (1 + scale) + shift
