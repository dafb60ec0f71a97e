"""The optimised arm: public callables with exactly the upstream signatures."""

from .group_norm_silu import apply_group_norm_silu, launches, triton_group_norm_silu, why_not

__all__ = ["apply_group_norm_silu", "launches", "triton_group_norm_silu", "why_not"]
