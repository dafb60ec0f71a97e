"""The ops in plain PyTorch, as a model's authors would write them: the `eager` arm."""

import torch


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: torch.Tensor | None = None,
) -> None:
    """Softmax in float32, then its k largest."""
    logits = gating_output.float()
    if moe_softcapping:
        logits = torch.tanh(logits / moe_softcapping) * moe_softcapping
    if correction_bias is not None:
        logits = logits + correction_bias
    weights, ids = torch.softmax(logits, dim=-1).topk(topk_ids.shape[1], dim=-1)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_ids.copy_(ids)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,  # noqa: ARG001  scratch
    pad_sorted_token_ids: bool = False,
    *,
    write_inactive_prefix_count: bool = False,
    map_invalid_experts_to_sentinel: bool = False,
    pad_expert_ids: bool = False,
) -> None:
    """Count, pad, and write the pairs in the order of a stable sort."""
    bucket = topk_ids.flatten().long() + 1
    if map_invalid_experts_to_sentinel:
        bucket = torch.where((bucket < 0) | (bucket >= num_experts), 0, bucket)
    count = torch.bincount(bucket, minlength=num_experts)
    blocks = (count + block_size - 1) // block_size
    first = blocks.cumsum(0) - blocks
    order = bucket.argsort(stable=True)
    rank = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[bucket[order]]
    if pad_sorted_token_ids:
        sorted_token_ids.fill_(topk_ids.numel())
    sorted_token_ids[first[bucket[order]] * block_size + rank] = order.int()
    used = int(blocks.sum())
    expert_ids[:used] = torch.arange(-1, num_experts - 1, device=order.device).repeat_interleave(blocks).int()
    if pad_expert_ids:
        expert_ids[used:] = -1
    num_tokens_post_pad[0] = used * block_size
    if write_inactive_prefix_count:
        num_tokens_post_pad[1] = blocks[0]


def moe_topk_sum(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The sum over the second dimension, in float32."""
    return out.copy_(x.sum(dim=1, dtype=torch.float32))
