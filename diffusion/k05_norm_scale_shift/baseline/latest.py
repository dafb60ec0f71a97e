"""The same callables in SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.diffusion.norm.scale_residual_norm_cutedsl import (
    fused_norm_scale_shift,
    fused_scale_residual_norm_scale_shift,
)

__all__ = ["fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift"]
