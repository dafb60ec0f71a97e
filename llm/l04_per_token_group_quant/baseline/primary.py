"""Upstream's group quantisation, SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

import torch
from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

__all__ = ["per_token_group_quant", "silu_and_mul_quant"]


def silu_and_mul_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's fused mode that gives the bits of its two kernels in sequence."""
    return per_token_group_quant(
        input, output_q, output_s, group_size, fuse_silu_and_mul=True, silu_and_mul_mode="dense"
    )
