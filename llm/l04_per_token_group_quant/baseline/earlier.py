"""Upstream's group quantisation, SGLang 0.5.12.post1, without SiLU; import after `upstream.activate`."""

import torch
from sglang.jit_kernel.per_token_group_quant_8bit import per_token_group_quant_8bit

__all__ = ["per_token_group_quant"]


def per_token_group_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass what 0.5.23 has as constants: the least maximum of a group, and float8's range."""
    return per_token_group_quant_8bit(input, output_q, output_s, group_size, 1e-10, -448.0, 448.0)
