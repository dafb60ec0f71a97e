"""Upstream's chain, SGLang 0.5.12.post1: PyTorch adds table and temb, then come its fused ops, as its Wan block has it.

Upstream's block makes all six slices once, and each of its calls reads one to three. A call here makes the slices that
it reads, with the same operations, so that the calls of a block together cost what the block does. Import after
`kda_judge.arms.upstream.activate`.
"""

import torch
from sglang.jit_kernel.diffusion.cutedsl.scale_residual_norm_scale_shift import (
    fused_norm_scale_shift,
    fused_scale_residual_norm_scale_shift,
)
from sglang.jit_kernel.diffusion.triton.scale_shift import fuse_scale_shift_kernel

__all__ = ["temb_norm_scale_shift", "temb_residual", "temb_residual_norm_scale_shift"]


def temb_norm_scale_shift(
    x: torch.Tensor, temb: torch.Tensor, table: torch.Tensor, shift: int = 0, scale: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """Upstream's slices of temb and table, then its norm."""
    shift_slice, scale_slice = _slices(table, temb, shift, scale)
    return fused_norm_scale_shift(x.contiguous(), None, None, scale_slice, shift_slice, "layer", eps)


def temb_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    temb: torch.Tensor,
    gate_table: torch.Tensor | None,
    table: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: int = 2,
    shift: int = 0,
    scale: int = 1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's slices of temb and tables, then its norm of a gated residual.

    This release uses two kernels to add the feed-forward's gated output and to compute the next block's first norm. So
    does a call with a gate and a modulation here.
    """
    if gate_table is not None and table is not None:
        r = temb_residual(residual, x, temb, gate_table, gate)
        shift_slice, scale_slice = _slices(table, temb, shift, scale)
        return fused_norm_scale_shift(r, weight, bias, scale_slice, shift_slice, "layer", eps), r
    gate_slice = None if gate_table is None else _slices(gate_table, temb, gate)[0]
    shift_slice = scale_slice = torch.zeros((1,), device=x.device, dtype=x.dtype)
    if table is not None:
        shift_slice, scale_slice = _slices(table, temb, shift, scale)
    y, r = fused_scale_residual_norm_scale_shift(
        residual.contiguous(), x.contiguous(), gate_slice, weight, bias, scale_slice, shift_slice, "layer", eps
    )
    return y, r


def temb_residual(
    residual: torch.Tensor, x: torch.Tensor, temb: torch.Tensor, gate_table: torch.Tensor, gate: int = 2
) -> torch.Tensor:
    """Upstream's slice of temb and table, then its multiply-add."""
    (gate_slice,) = _slices(gate_table, temb, gate)
    return fuse_scale_shift_kernel(x.contiguous(), gate_slice, residual, scale_constant=0)


def _slices(table: torch.Tensor, temb: torch.Tensor, *numbers: int) -> list[torch.Tensor]:
    """The slices `numbers` of table + temb, [B, S, D] or [B, 1, D] float32, made contiguous as in upstream's layers."""
    first, last = min(numbers), max(numbers)
    span = slice(first, last + 1)
    if temb.dim() == 4:
        parts = (table[:, span].unsqueeze(0) + temb[:, :, span].float()).unbind(2)
    else:
        parts = (table[:, span] + temb[:, span].float()).split(1, dim=1)
    return [parts[number - first].contiguous() for number in numbers]
