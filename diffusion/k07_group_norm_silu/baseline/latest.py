"""The same callables in SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.diffusion.norm.group_norm_silu import apply_group_norm_silu
from sglang.kernels.ops.diffusion.norm.group_norm_silu_triton import triton_group_norm_silu

__all__ = ["apply_group_norm_silu", "triton_group_norm_silu"]
