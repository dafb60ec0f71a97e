"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .gelu_tanh_cat import fused_gelu_tanh_cat

__all__ = ["fused_gelu_tanh_cat", "launches", "why_not"]

launches, why_not = hooks(fused_gelu_tanh_cat)
