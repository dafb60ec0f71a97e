"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .group_norm_silu import apply_group_norm_silu, triton_group_norm_silu

__all__ = ["apply_group_norm_silu", "launches", "triton_group_norm_silu", "why_not"]

launches, why_not = hooks(triton_group_norm_silu, apply_group_norm_silu)
