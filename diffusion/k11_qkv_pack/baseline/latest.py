"""What the models of SGLang 0.5.23 call one after the other; import after `kda_judge.arms.upstream.activate`.

HunyuanVideo normalises q and k by a kernel of FlashInfer, which reads them where they lie. One kernel of the release
then rotates the tokens of the clip, and writes q, k and v of clip and text side by side. FLUX calls what it called
before (`primary`), with positions that are made once.
"""

import torch
from sglang.kernels.ops.diffusion.rope.hunyuan_qkv_pack_triton import hunyuan_qkv_rope_pack
from sglang.kernels.ops.diffusion.rope.qknorm_rope_jit import fused_inplace_qknorm_rope
from sglang.kernels.ops.diffusion.sites.hunyuan_qknorm_site import HUNYUAN_QKNORM, try_hunyuan_qknorm

__all__ = ["qkv_norm_rope_pack"]

BLOCK = torch.nn.Module()
"""Stands for a block of HunyuanVideo, in which the release switches its norm on."""
HUNYUAN_QKNORM.mark(BLOCK)
POSITIONS: dict[tuple[int, torch.device], torch.Tensor] = {}
"""(Tokens, device) -> their numbers."""


def qkv_norm_rope_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """FLUX's chain where sin lies behind cos, else HunyuanVideo's."""
    if cos is not None and sin is None:
        planes = torch.stack((q, k, v), out=out)
        numbers = (q.shape[1], q.device)
        if numbers not in POSITIONS:
            POSITIONS[numbers] = torch.arange(numbers[0], device=numbers[1])
        for one in range(q.shape[0]):
            fused_inplace_qknorm_rope(
                planes[0, one], planes[1, one], q_weight, k_weight, cos, POSITIONS[numbers], is_neox=False, eps=eps
            )
        return planes
    if not (HUNYUAN_QKNORM.is_enabled(BLOCK) or HUNYUAN_QKNORM.mount(BLOCK)):
        raise ImportError("HunyuanVideo's norm needs FlashInfer, as SGLang does: expected flashinfer-python 0.7.2")
    normed = try_hunyuan_qknorm(BLOCK, q, k, q_weight, k_weight, eps)
    assert normed is not None, "the norm takes bfloat16 alone"
    if cos is None:
        return torch.stack((*normed, v), out=out)
    clip, text = ([x[:, part] for x in (*normed, v)] for part in (slice(len(cos)), slice(len(cos), None)))
    y = hunyuan_qkv_rope_pack(*clip, *text, cos, sin)[0]
    y = y.as_strided((3, *y.shape), (y.numel(), *y.stride()))  # the planes lie one behind the other
    return y if out is None else out.copy_(y)
