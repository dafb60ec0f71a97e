"""The same callables in SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`."""

from sglang.kernels.ops.diffusion.rope.ltx2_rotary_triton import apply_ltx2_split_rotary_emb
from sglang.kernels.ops.diffusion.rope.rotary_triton import apply_rotary_embedding

__all__ = ["apply_ltx2_split_rotary_emb", "apply_rotary_embedding"]
