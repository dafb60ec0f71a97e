"""Upstream's fused scale/shift kernels, SGLang 0.5.12.post1; import after `kda_judge.arms.upstream.activate`."""

from sglang.jit_kernel.diffusion.triton.scale_shift import (
    fuse_layernorm_scale_shift_gate_select01_kernel,
    fuse_residual_layernorm_scale_shift_gate_select01_kernel,
    fuse_scale_shift_kernel,
)

__all__ = [
    "fuse_layernorm_scale_shift_gate_select01_kernel",
    "fuse_residual_layernorm_scale_shift_gate_select01_kernel",
    "fuse_scale_shift_kernel",
]
