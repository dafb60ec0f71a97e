"""Upstream's MoE routing, SGLang 0.5.23; import after `upstream.activate`, where there is a GPU."""

from sglang.kernels.ops.moe.moe_align import moe_align_block_size
from sglang.kernels.ops.moe.moe_topk_softmax import topk_softmax
from sglang.kernels.ops.moe.moe_topk_sum import moe_topk_sum

__all__ = ["moe_align_block_size", "moe_topk_sum", "topk_softmax"]
