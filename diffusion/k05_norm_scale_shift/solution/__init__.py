"""The optimised arm: public callables with exactly the upstream signatures."""

from .norm_scale_shift import (
    fused_norm_scale_shift,
    fused_scale_residual_norm_scale_shift,
    launches,
    why_not,
)

__all__ = ["fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift", "launches", "why_not"]
