"""What the models of SGLang 0.5.23 run; import after `kda_judge.arms.upstream.activate`.

LongCat-Image, whose mlp is contiguous, calls a kernel of the release's own, which refuses anything but contiguous
bfloat16. HunyuanVideo, whose mlp is a stretch of columns, and Hunyuan3D, in float16, run PyTorch's two. FLUX has no
call of that kernel either; here it gets it all the same, so that a row is never against less than the release can do.
"""

from functools import wraps

import torch
from sglang.kernels.ops.diffusion.activation.gelu_tanh_cat_jit import fused_gelu_tanh_cat

from . import primary

__all__ = ["fused_gelu_tanh_cat"]

KERNEL = fused_gelu_tanh_cat


@wraps(KERNEL)
def fused_gelu_tanh_cat(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """The columns of attn, and behind them the GELU of those of mlp."""
    if mlp.dtype == torch.bfloat16 and mlp.is_contiguous():
        return KERNEL(attn, mlp)
    return primary.fused_gelu_tanh_cat(attn, mlp)
