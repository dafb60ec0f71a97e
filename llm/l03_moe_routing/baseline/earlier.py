"""The alignment of SGLang 0.5.12.post1, which has none of the other ops; import after `upstream.activate`."""

from sglang.jit_kernel.moe_align import moe_align_block_size

__all__ = ["moe_align_block_size"]
