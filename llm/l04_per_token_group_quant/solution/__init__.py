"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .group_quant import per_token_group_quant, silu_and_mul_quant

__all__ = ["launches", "per_token_group_quant", "silu_and_mul_quant", "why_not"]

launches, why_not = hooks(per_token_group_quant, silu_and_mul_quant)
