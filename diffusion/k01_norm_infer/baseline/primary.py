"""Upstream's inference norms, SGLang 0.5.12.post1; import after `upstream.activate`, where there is a GPU."""

from sglang.jit_kernel.diffusion.triton.norm import norm_infer
from sglang.jit_kernel.diffusion.triton.rmsnorm_onepass import triton_one_pass_rms_norm

__all__ = ["norm_infer", "triton_one_pass_rms_norm"]
