"""QuACK's RMSNorm, 0.6.5, with the op's signatures; import after `kda_judge.arms.upstream.activate`."""

import torch
from quack.rmsnorm import _rmsnorm_fwd

__all__ = ["fused_add_rmsnorm", "rmsnorm"]


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """The kernel reads each row before it writes it, so results may overwrite the inputs."""
    _rmsnorm_fwd(input, weight, input, residual=residual, residual_out=residual, eps=eps)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1e-6) -> None:
    """The norm alone."""
    _rmsnorm_fwd(input, weight, input if out is None else out, eps=eps)
