"""Upstream's CuTe DSL kernels, SGLang 0.5.12.post1; import after `kda_judge.arms.upstream.activate`."""

from sglang.jit_kernel.diffusion.cutedsl.scale_residual_norm_scale_shift import (
    fused_norm_scale_shift,
    fused_scale_residual_norm_scale_shift,
)

__all__ = ["fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift"]
