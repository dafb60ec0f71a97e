"""The ops in plain PyTorch, as a model's authors would write them: the `eager` and `compile` arms."""

import torch
from torch.nn.functional import silu

LARGEST = 448.0


def per_token_group_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale every group of a row so that its largest element is float8's largest number, and round."""
    groups = input.float().unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1).clamp(min=1e-10)
    q = (groups * (LARGEST / amax).unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return output_q.copy_(q.flatten(-2).to(torch.float8_e4m3fn)), output_s.copy_(amax / LARGEST)


def silu_and_mul_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for SiLU of the first half of every row times the second, rounded to input's dtype."""
    gate, up = input.float().chunk(2, dim=-1)
    return per_token_group_quant((silu(gate) * up).to(input.dtype), output_q, output_s, group_size)
