"""The optimised arm: the public callable of this op."""

from kda_runtime.op import hooks

from .rounded_qknorm_rope import rounded_qknorm_rope

__all__ = ["launches", "rounded_qknorm_rope", "why_not"]

launches, why_not = hooks(rounded_qknorm_rope)
