"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .norm_scale_shift import fused_norm_scale_shift, fused_scale_residual_norm_scale_shift

__all__ = ["fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift", "launches", "why_not"]

launches, why_not = hooks(fused_norm_scale_shift, fused_scale_residual_norm_scale_shift)
