"""Run by test_llm.py in a process of its own, with TRITON_INTERPRET=1: upstream's grouped GEMM as a capture calls it.

Its Triton kernel is interpreted on the CPU, in float16, on rows that `moe_align` of `PlainOps` has sorted, and compared
with `PlainOps`. Prints the largest difference of each of three calls.
"""

import sys
from pathlib import Path

import torch

from kda_judge.arms import sglang_standins
from kda_tools.llm.step_ops import MoeRouting, PlainOps, UpstreamOps

TOKENS, EXPERTS, K, HIDDEN, INNER, BLOCK = 5, 4, 2, 64, 48, 16


def main(tree: str, version: str) -> None:
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    sglang_standins.is_cuda = lambda: True  # imports as on a GPU
    upstream, plain = UpstreamOps(Path(tree), version), PlainOps()
    tuned = upstream._moe_settings(128, 768, 16)
    assert tuned["BLOCK_SIZE_K"] > upstream._moe_settings(EXPERTS, 1, 1)["BLOCK_SIZE_K"], (
        "the wheel's own, not a default"
    )
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).half()

    weights, experts = plain.topk_softmax(normal(TOKENS, EXPERTS), K)
    routing = MoeRouting(weights, experts, plain.moe_align(experts, EXPERTS, BLOCK), BLOCK)
    up, down = normal(EXPERTS, INNER, HIDDEN) / 10, normal(EXPERTS, HIDDEN, INNER) / 10
    for x, weight, where, weighted in (
        (normal(TOKENS, HIDDEN), up, routing, False),
        (normal(TOKENS, HIDDEN), up, routing, True),
        (normal(TOKENS * K, INNER), down, routing.each_token_once(), True),
    ):
        found = [torch.full((TOKENS, K, weight.shape[1]), torch.nan).half() for _ in range(2)]
        for ops, out in zip((plain, upstream), found, strict=True):
            ops.moe_gemm(x, weight, out, where, weighted)
        print((found[0] - found[1]).abs().max().item())


if __name__ == "__main__":
    main(*sys.argv[1:])
