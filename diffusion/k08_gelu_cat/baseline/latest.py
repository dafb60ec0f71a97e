"""What the models of SGLang 0.5.23 run; import after `kda_judge.arms.upstream.activate`.

LongCat-Image, whose mlp is contiguous, calls a kernel of the release's own, which refuses anything but contiguous
bfloat16. HunyuanVideo, whose mlp is a stretch of columns, and Hunyuan3D, in float16, run PyTorch's two kernels. FLUX
does not call that kernel either. Here it does, so that no row is compared with less than the release can do.
"""

from functools import wraps

import torch
from sglang.kernels.ops.diffusion.activation.gelu_tanh_cat_jit import fused_gelu_tanh_cat

from . import primary

__all__ = ["fused_gelu_tanh_cat"]

KERNEL = fused_gelu_tanh_cat


@wraps(KERNEL)
def fused_gelu_tanh_cat(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """The columns of attn, then the GELU of the columns of mlp."""
    if mlp.dtype == torch.bfloat16 and mlp.is_contiguous():
        return KERNEL(attn, mlp)
    return primary.fused_gelu_tanh_cat(attn, mlp)
