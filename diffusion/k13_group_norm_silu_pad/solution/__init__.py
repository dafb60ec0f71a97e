"""The optimised arm: public callables of clips in channels-last order."""

from kda_runtime.op import hooks

from .pixels import group_norm_silu_pad, upsample_pad
from .residual import bias_residual

__all__ = ["bias_residual", "group_norm_silu_pad", "launches", "upsample_pad", "why_not"]

launches, why_not = hooks(group_norm_silu_pad, upsample_pad, bias_residual)
