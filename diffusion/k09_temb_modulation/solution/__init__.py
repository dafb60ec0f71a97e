"""The optimised arm: public callables with exactly the baseline's signatures."""

from kda_runtime.op import hooks

from .temb_modulation import temb_norm_scale_shift, temb_residual, temb_residual_norm_scale_shift

__all__ = ["launches", "temb_norm_scale_shift", "temb_residual", "temb_residual_norm_scale_shift", "why_not"]

launches, why_not = hooks(temb_norm_scale_shift, temb_residual_norm_scale_shift, temb_residual)
