"""The same callables in SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`, where there is a GPU."""

from sglang.kernels.ops.diffusion.norm.norm_triton import norm_infer
from sglang.kernels.ops.diffusion.norm.rmsnorm_onepass_triton import triton_one_pass_rms_norm

__all__ = ["norm_infer", "triton_one_pass_rms_norm"]
