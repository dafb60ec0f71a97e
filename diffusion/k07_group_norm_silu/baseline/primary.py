"""Upstream's GroupNorm with SiLU, SGLang 0.5.12.post1; import after `kda_judge.arms.upstream.activate`."""

from sglang.jit_kernel.diffusion.group_norm_silu import apply_group_norm_silu
from sglang.jit_kernel.diffusion.triton.group_norm_silu import triton_group_norm_silu

__all__ = ["apply_group_norm_silu", "triton_group_norm_silu"]
