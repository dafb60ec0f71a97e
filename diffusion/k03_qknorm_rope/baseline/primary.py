"""Upstream's fused q/k RMSNorm and rotary embedding, SGLang 0.5.12.post1; import after `upstream.activate`."""

from sglang.jit_kernel.diffusion.qknorm_rope import fused_inplace_qknorm_rope

__all__ = ["fused_inplace_qknorm_rope"]
