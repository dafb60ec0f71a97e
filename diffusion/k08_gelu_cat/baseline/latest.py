"""The kernel of SGLang 0.5.23, which its LongCat-Image calls; import after `kda_judge.arms.upstream.activate`.

It takes contiguous bfloat16 alone, and raises for mlp as a stretch of columns: on those rows this arm has no time.
"""

from sglang.kernels.ops.diffusion.activation.gelu_tanh_cat_jit import fused_gelu_tanh_cat

__all__ = ["fused_gelu_tanh_cat"]
