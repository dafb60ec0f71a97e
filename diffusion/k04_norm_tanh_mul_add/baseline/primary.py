"""Upstream's CuTe DSL kernels, SGLang 0.5.12.post1; import after `kda_judge.arms.upstream.activate`."""

from sglang.jit_kernel.diffusion.cutedsl.norm_tanh_mul_add_norm_scale import (
    fused_norm_tanh_mul_add,
    fused_norm_tanh_mul_add_norm_scale,
)

__all__ = ["fused_norm_tanh_mul_add", "fused_norm_tanh_mul_add_norm_scale"]
