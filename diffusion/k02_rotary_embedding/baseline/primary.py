"""Upstream's two rotary embeddings, SGLang 0.5.12.post1; import after `kda_judge.arms.upstream.activate`."""

from sglang.jit_kernel.diffusion.triton.ltx2_rotary import apply_ltx2_split_rotary_emb
from sglang.jit_kernel.diffusion.triton.rotary import apply_rotary_embedding

__all__ = ["apply_ltx2_split_rotary_emb", "apply_rotary_embedding"]
