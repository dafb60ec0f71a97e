"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .norm_tanh_mul_add import fused_norm_tanh_mul_add, fused_norm_tanh_mul_add_norm_scale

__all__ = ["fused_norm_tanh_mul_add", "fused_norm_tanh_mul_add_norm_scale", "launches", "why_not"]

launches, why_not = hooks(fused_norm_tanh_mul_add, fused_norm_tanh_mul_add_norm_scale)
