"""Upstream's chain, SGLang 0.5.23: its kernel writes the slices of table + temb, then come its fused ops.

Upstream's block writes all six slices in one launch, and each of its calls reads one to three. A call here writes the
slices that it reads, with the same kernel, so that the calls of a block together cost what the block does. Import after
`kda_judge.arms.upstream.activate`.
"""

import torch
import triton
from sglang.kernels.ops.diffusion.modulate.scale_shift_triton import fuse_scale_shift_kernel
from sglang.kernels.ops.diffusion.modulate.wan_temb_table_slices_triton import _temb_table_slices_kernel
from sglang.kernels.ops.diffusion.norm.scale_residual_norm_cutedsl import (
    fused_norm_scale_shift,
    fused_scale_residual_norm_scale_shift,
)

__all__ = ["temb_norm_scale_shift", "temb_residual", "temb_residual_norm_scale_shift"]

SLICES = 6
"""Slices of a token, which the kernel steps over to reach the next token."""


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
    """Upstream's slices of temb and tables, then its norm of a gated residual."""
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
    """The slices `numbers` of table + temb, [B, S, D] or [B, 1, D] float32, each contiguous."""
    first, last = min(numbers), max(numbers)
    if temb.dim() == 3:
        parts = (table[:, first : last + 1] + temb[:, first : last + 1].float()).split(1, dim=1)
        return [parts[number - first].contiguous() for number in numbers]
    if not (temb.is_contiguous() and table.is_contiguous() and temb.shape[2] == SLICES):
        # Wan's own fallback. Helios has no kernel for the slices and adds in the same way.
        span = slice(first, last + 1)
        parts = (table[:, span].unsqueeze(0) + temb[:, :, span].float()).unbind(2)
        return [parts[number - first].contiguous() for number in numbers]
    batch, tokens, _, columns = temb.shape
    made = temb.new_empty((last - first + 1, batch, tokens, columns), dtype=torch.float32)
    # The grid of upstream's launch, whose second dimension is the slice, and upstream's block size.
    block = min(1024, triton.next_power_of_2(columns))
    _temb_table_slices_kernel[(batch * tokens, len(made))](
        made,
        temb[:, :, first:],
        table[:, first:],
        batch * tokens,
        D=columns,
        BLOCK=block,
        NCHUNK=triton.cdiv(columns, block),
    )
    return [made[number - first] for number in numbers]
