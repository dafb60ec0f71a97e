"""Upstream's softmax for its sampler, SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.sampling import softmax

__all__ = ["softmax"]
