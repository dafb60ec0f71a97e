"""Inputs for this task's tests, and calls that are compared with the oracle by the contract's own rules."""

from pathlib import Path

import torch

from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.judge.oracle import ask_oracle, load_reference
from kda_judge.judge.output_rules import judged

from .. import solution

TASK = Task(Path(__file__).parents[1])
TOPK, ALIGN, SUM = "topk_softmax", "moe_align_block_size", "moe_topk_sum"


def normal(*shape, dtype=torch.bfloat16, device="cpu"):
    """N(0, 1), the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def topk_arguments(logits, k, bias=None):
    """A call's tensors; what is to be written holds NaN, or -1."""
    device = logits.device
    return {
        "topk_weights": torch.full((len(logits), k), float("nan"), device=device),
        "topk_ids": torch.full((len(logits), k), -1, dtype=torch.int32, device=device),
        "gating_output": logits,
        "correction_bias": bias,
    }


def align_arguments(ids, num_experts, block_size, slack=0, counts=1):
    """A call's tensors for these ids: buffers as small as they may be, and `slack` more, full of zeros."""
    most = min(ids.numel() * block_size, ids.numel() + num_experts * (block_size - 1)) + slack
    sizes = (most, -(-most // block_size), counts, num_experts + 1)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad", "cumsum_buffer")
    buffers = {n: torch.zeros(s, dtype=torch.int32, device=ids.device) for n, s in zip(names, sizes, strict=True)}
    return {"topk_ids": ids, **buffers}


def sum_arguments(x):
    return {"x": x, "out": torch.full_like(x[:, 0], float("nan"), memory_format=torch.contiguous_format)}


def check(op, tensors, arm=solution, **scalars):
    """Call `op` of an arm and compare what it wrote with the oracle, by the rules of config.toml."""
    contract = TASK.config.ops[op]
    specs = {
        name: TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), fill="arange")
        for name, t in tensors.items()
        if t is not None
    }
    row = Workload(id="case", op=op, inputs=specs, scalars=scalars, inplace=contract.outputs)
    # The oracle takes no tensor without memory of its own: it must not see what is written.
    before = {name: None if t is None else t.clone() for name, t in tensors.items()}
    want = ask_oracle(load_reference(TASK), contract, row, before)
    returned = getattr(arm, op)(**tensors, **scalars)
    assert returned is (tensors[contract.outputs[0]] if contract.returns == "argument" else None)
    for name, expected in zip(contract.outputs, want, strict=True):
        rule, keys = contract.rules.get(name), want.keys.get(name)
        found = judged(name, rule, TASK.config.tolerance, tensors[name], expected, 64.0, None, keys)
        assert found.failure is None
    for name, value in tensors.items():
        assert value is None or name in contract.outputs or torch.equal(value, before[name])
