"""What the models of SGLang 0.5.12.post1 call one after the other; import after `kda_judge.arms.upstream.activate`.

HunyuanVideo copies q and k together, normalises them and rotates the tokens of the clip; its attention then joins these
with the tokens of the text. FLUX normalises and rotates in place, in one kernel, and joins two streams by `torch.cat`.
Here the op's result is one stream: `torch.stack` copies as many bytes as the model's `torch.cat`, and FLUX's kernel
works in the copy, so that the arguments stay as they are. HunyuanVideo's single block has both streams: there
`torch.cat` joins them, as in the model.
"""

import torch
from sglang.jit_kernel.diffusion.qknorm_rope import fused_inplace_qknorm_rope
from sglang.jit_kernel.diffusion.triton.rmsnorm_onepass import triton_one_pass_rms_norm
from sglang.jit_kernel.diffusion.triton.rotary import apply_rotary_embedding

__all__ = ["qkv_norm_rope_pack"]


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
        positions = torch.arange(q.shape[1], device=q.device)
        for one in range(q.shape[0]):
            fused_inplace_qknorm_rope(
                planes[0, one], planes[1, one], q_weight, k_weight, cos, positions, is_neox=False, eps=eps
            )
        return planes

    parts = [
        triton_one_pass_rms_norm(x.contiguous().flatten(0, -2), weight, eps).view(x.shape)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    rows = 0 if cos is None else len(cos)
    rotated = [apply_rotary_embedding(x[:, :rows], cos, sin) for x in parts] if rows else parts
    if not 0 < rows < q.shape[1]:
        return torch.stack((*rotated, v), out=out)
    y = v.new_empty((3, *v.shape)) if out is None else out
    for plane, clip, whole in zip(y, (*rotated, v[:, :rows]), (*parts, v), strict=True):
        torch.cat((clip, whole[:, rows:]), dim=1, out=plane)
    return y
