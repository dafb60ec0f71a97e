"""The optimised arm: public callables with exactly the upstream signatures."""

from .norm_tanh_mul_add import (
    fused_norm_tanh_mul_add,
    fused_norm_tanh_mul_add_norm_scale,
    launches,
    why_not,
)

__all__ = ["fused_norm_tanh_mul_add", "fused_norm_tanh_mul_add_norm_scale", "launches", "why_not"]
