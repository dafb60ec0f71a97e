"""The same callables in SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.layernorm.norm import fused_add_rmsnorm, rmsnorm

__all__ = ["fused_add_rmsnorm", "rmsnorm"]
