"""The fused operations of a serving step by the solutions of our tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kda_judge.contract.tasks import Task, find_tasks
from kda_tools.llm.known_llms import FOLDER
from kda_tools.llm.step_ops import StepOps, align_buffers
from kda_tools.models.calls import Log

Tensor = torch.Tensor
NAMES = (
    *("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "fused_inplace_qknorm_rope_kv_store"),
    *("topk_softmax", "moe_align_block_size", "moe_topk_sum", "softmax"),
)
"""The tasks' ops that a step calls."""


def step_tasks() -> list[Task]:
    """The tasks of language models."""
    return [task for task in find_tasks() if task.family == FOLDER.parts[0]]


def functions(tasks: Sequence[Task], log: Log | None = None) -> dict[str, Callable[..., Any]]:
    """Op -> its solution's function, for `NAMES`; counted by `log`."""
    found = {}
    for task in tasks:
        names = [name for name in task.config.ops if name in NAMES]
        solution = task.load("solution") if names else None
        for name in names:
            call = getattr(solution, name)
            found[name] = call if log is None else log.wrap(task, name, call, call, solution)
    return found


class SolutionOps:
    """`StepOps` by solutions: `ours` holds a function for each of `NAMES`. What no task replaces stays `base`'s."""

    def __init__(self, base: StepOps, ours: Mapping[str, Callable[..., Any]]) -> None:
        self._ours = ours
        self.qknorm, self.rope_kv_store = base.qknorm, base.rope_kv_store
        self.moe_block, self.moe_gemm = base.moe_block, base.moe_gemm

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: D102
        out = torch.empty_like(x)
        self._ours["rmsnorm"](x, weight, out, eps)
        return out

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:  # noqa: D102
        self._ours["fused_add_rmsnorm"](x, residual, weight, eps)

    def qknorm_rope_kv_store(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Any
    ) -> None:
        cos_sin, positions, slots, q_weight, k_weight, eps = rest
        op = self._ours["fused_inplace_qknorm_rope_kv_store"]
        op(q, k, v, k_pool, v_pool, q_weight, k_weight, cos_sin, positions, slots, is_neox=True, eps=eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:  # noqa: D102
        made: Tensor = self._ours["silu_and_mul"](x)
        return made

    def topk_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        weights = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
        experts = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
        self._ours["topk_softmax"](weights, experts, logits, renormalize=True)
        return weights, experts

    def moe_align(self, experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        rows, blocks, padded, scratch = align_buffers(experts, count, block)
        self._ours["moe_align_block_size"](experts, count + 1, block, rows, blocks, padded, scratch, True)
        return rows, blocks, padded

    def topk_sum(self, x: Tensor) -> Tensor:  # noqa: D102
        made: Tensor = self._ours["moe_topk_sum"](x, torch.empty_like(x[:, 0]))
        return made

    def softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:  # noqa: D102
        made: Tensor = self._ours["softmax"](logits, temperatures)
        return made
