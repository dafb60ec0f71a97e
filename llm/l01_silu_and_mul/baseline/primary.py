"""Upstream's gated SiLU, SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.activation.activation import silu_and_mul

__all__ = ["silu_and_mul"]
