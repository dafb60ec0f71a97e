"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .silu_and_mul import silu_and_mul

__all__ = ["launches", "silu_and_mul", "why_not"]

launches, why_not = hooks(silu_and_mul)
