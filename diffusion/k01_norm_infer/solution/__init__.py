"""The optimised arm: public callables with exactly the upstream signatures."""

from .norm import launches, norm_infer, triton_one_pass_rms_norm, why_not

__all__ = ["launches", "norm_infer", "triton_one_pass_rms_norm", "why_not"]
