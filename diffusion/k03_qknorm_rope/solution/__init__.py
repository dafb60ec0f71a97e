"""The optimised arm: public callables with exactly the upstream signatures."""

from .qknorm_rope import fused_inplace_qknorm_rope, launches, why_not

__all__ = ["fused_inplace_qknorm_rope", "launches", "why_not"]
