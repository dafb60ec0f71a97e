"""Upstream's RMSNorm with and without the residual, SGLang 0.5.12.post1; import after `upstream.activate`."""

from sglang.jit_kernel.norm import fused_add_rmsnorm, rmsnorm

__all__ = ["fused_add_rmsnorm", "rmsnorm"]
