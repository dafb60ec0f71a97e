"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .moe_align import moe_align_block_size
from .topk import topk_softmax
from .topk_sum import moe_topk_sum

__all__ = ["launches", "moe_align_block_size", "moe_topk_sum", "topk_softmax", "why_not"]

launches, why_not = hooks(topk_softmax, moe_align_block_size, moe_topk_sum)
