"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .rmsnorm import fused_add_rmsnorm, rmsnorm

__all__ = ["fused_add_rmsnorm", "launches", "rmsnorm", "why_not"]

launches, why_not = hooks(fused_add_rmsnorm, rmsnorm)
