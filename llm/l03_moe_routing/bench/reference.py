"""The float64 oracles, the bytes that the ops must move, and the contract of a row.

Parameters are in the order of an op's `inputs` in config.toml, scalars behind them.
"""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

FLOATS = ("float16", "bfloat16", "float32")
INPUTS = {
    "topk_softmax": {"topk_weights", "topk_ids", "gating_output"},
    "moe_align_block_size": {"topk_ids", "sorted_token_ids", "expert_ids", "num_tokens_post_pad", "cumsum_buffer"},
    "moe_topk_sum": {"x", "out"},
}
"""Inputs that a row has to give; `correction_bias` may be left out."""


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor | None = None,
    *,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of every token, [tokens, k] float64 each, the largest weight first."""
    assert topk_weights.shape == topk_ids.shape
    weights, ids = probabilities(gating_output, correction_bias, moe_softcapping).topk(topk_ids.shape[1], dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.double()


def probabilities(
    gating_output: torch.Tensor, correction_bias: torch.Tensor | None, moe_softcapping: float
) -> torch.Tensor:
    """Softmax of the capped and corrected logits, [tokens, experts] float64."""
    logits = gating_output.double()
    if moe_softcapping:
        logits = torch.tanh(logits / moe_softcapping) * moe_softcapping
    if correction_bias is not None:
        logits = logits + correction_bias.double()
    return torch.softmax(logits, dim=-1)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,
    *,
    num_experts: int,
    block_size: int,
    pad_sorted_token_ids: bool = False,
    write_inactive_prefix_count: bool = False,
    map_invalid_experts_to_sentinel: bool = False,
    pad_expert_ids: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the four buffers shall hold, float64; places that the op does not write keep what they hold."""
    pairs, blocks, total = sorted_token_ids.double(), expert_ids.double(), num_tokens_post_pad.double()
    bucket = buckets(topk_ids, num_experts, map_invalid_experts_to_sentinel)
    if pad_sorted_token_ids:
        pairs.fill_(topk_ids.numel())
    if pad_expert_ids:
        blocks.fill_(-1)
    place = 0
    for number in range(num_experts):
        members = (bucket == number).nonzero().flatten()
        pairs[place : place + len(members)] = members.double()
        behind = place + -(-len(members) // block_size) * block_size
        blocks[place // block_size : behind // block_size] = number - 1
        if number == 0 and write_inactive_prefix_count:
            total[1] = behind // block_size
        place = behind
    total[0] = place
    return pairs, blocks, total, cumsum_buffer.double()


def buckets(topk_ids: torch.Tensor, num_experts: int, map_invalid: bool) -> torch.Tensor:
    """The bucket of every pair of a token and an expert: the expert's number plus one, int64."""
    bucket = topk_ids.flatten().long() + 1
    outside = (bucket < 0) | (bucket >= num_experts)
    return torch.where(outside, 0, bucket) if map_invalid else bucket


def moe_topk_sum(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor]:
    """[tokens, width] float64."""
    assert out.shape == (x.shape[0], x.shape[2])
    return (x.double().sum(dim=1),)


def keys(row: Workload, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ids are compared by: probabilities of experts, buckets of pairs; the number after the pairs is padding."""
    if row.op == "topk_softmax":
        cap = float(row.scalars.get("moe_softcapping", 0.0))
        return {"topk_ids": probabilities(values["gating_output"], values.get("correction_bias"), cap)}
    if row.op != "moe_align_block_size":
        return {}
    count = int(row.scalars["num_experts"])
    bucket = buckets(values["topk_ids"], count, bool(row.scalars.get("map_invalid_experts_to_sentinel")))
    return {"sorted_token_ids": torch.cat([bucket, bucket.new_tensor([count])]).double()}


def bytes_moved(workload: Workload) -> int:
    """Inputs are read once; tensors written in place are only written. Buffers count whole."""
    return sum(spec.nbytes for spec in workload.inputs.values())


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    needed = INPUTS[workload.op]
    expect(needed <= set(inputs) <= needed | {"correction_bias"}, "inputs", str(sorted(needed)), sorted(inputs))
    shapes = {name: inputs[name].shape for name in inputs}
    if workload.op == "topk_softmax":
        tokens, experts = shapes["gating_output"]
        k = shapes["topk_ids"][-1]
        expect(0 < k <= experts, "topk_ids", f"1 to {experts} columns", k)
        for name, dtype in (("topk_weights", "float32"), ("topk_ids", "int32")):
            fits = (shapes[name], inputs[name].dtype) == ((tokens, k), dtype)
            expect(fits, name, f"{dtype} [{tokens}, {k}]", f"{inputs[name].dtype} {list(shapes[name])}")
        expect(inputs["gating_output"].dtype in FLOATS, "gating_output", str(FLOATS), inputs["gating_output"].dtype)
    elif workload.op == "moe_align_block_size":
        block, buckets_ = int(scalars["block_size"]), int(scalars["num_experts"])
        expect(block > 0, "block_size", "a positive number", block)
        pairs = shapes["topk_ids"][0] * shapes["topk_ids"][1]
        most = min(pairs * block, pairs + buckets_ * (block - 1))
        size = shapes["sorted_token_ids"][0]
        expect(size >= most, "sorted_token_ids", f"{most} elements or more", size)
        expect(
            shapes["expert_ids"][0] * block >= most, "expert_ids", f"{-(-most // block)} or more", shapes["expert_ids"]
        )
        expect(
            shapes["cumsum_buffer"][0] > buckets_, "cumsum_buffer", f"{buckets_ + 1} or more", shapes["cumsum_buffer"]
        )
        count = 1 + bool(scalars.get("write_inactive_prefix_count"))
        expect(
            shapes["num_tokens_post_pad"] == (count,),
            "num_tokens_post_pad",
            f"[{count}]",
            shapes["num_tokens_post_pad"],
        )
    else:
        tokens, _, width = shapes["x"]
        fits = (shapes["out"], inputs["out"].dtype) == ((tokens, width), inputs["x"].dtype)
        expect(fits, "out", f"{inputs['x'].dtype} [{tokens}, {width}]", f"{inputs['out'].dtype} {list(shapes['out'])}")
