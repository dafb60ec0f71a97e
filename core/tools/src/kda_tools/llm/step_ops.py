"""The fused operations of a serving step: in PyTorch, and as SGLang's own kernels from the pinned wheel.

With the PyTorch forms the structure of a step can be tested without a GPU. They are not the kernels of a server, so
they are never timed. SGLang's kernels need a GPU, and are built at their first call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from kda_tools.llm import kernel_imports

Tensor = torch.Tensor
DEFAULT_MOE_SETTINGS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
"""The default of SGLang 0.5.23, for GPUs without a tuned configuration."""
PLAIN_BLOCK = 16
"""Rows of a block of the grouped GEMM in PyTorch."""


class StepOps(Protocol):
    """The operations of a step beside GEMMs, attention and the embedding. Hidden states are [tokens, hidden]."""

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of x over its last dimension, as a new tensor."""

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """In place: residual += x, then x = rmsnorm(residual)."""

    def qknorm(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """In place, over the last dimension of [tokens, heads, width]."""

    @property
    def qknorm_rope_kv_store(self) -> Callable[..., None] | None:
        """`qknorm` and `rope_kv_store` in one op: the latter's arguments, then q_weight, k_weight and eps; or None."""

    def rope_kv_store(self, *args: Tensor) -> None:
        """In place: rotate q and k, then write k and v to the slots of the pools.

        Arguments: q, k, v [tokens, heads, width], k_pool, v_pool [slots, kv_heads * width], cos_sin [positions, width],
        positions [tokens], slots [tokens].
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[tokens, 2 * n] -> [tokens, n]."""

    def topk_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """For each token the weights, which add up to 1, and the numbers of its k experts; [tokens, k] each."""

    def moe_align(self, experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by expert and padded to blocks, the expert of each block, and how many rows that makes."""

    def moe_block(self, experts: int, width: int, tokens: int) -> int:
        """Rows of a block of the grouped GEMM."""

    def moe_gemm(self, x: Tensor, weight: Tensor, out: Tensor, routing: MoeRouting, weighted: bool) -> None:
        """out[row] = x[row // k] @ weight[expert of row].T, times the row's weight where `weighted`."""

    def topk_sum(self, x: Tensor) -> Tensor:
        """[tokens, k, hidden] -> [tokens, hidden]."""

    def softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Probabilities in float32 of [sequences, vocabulary] over [sequences, 1]."""


class MoeRouting:
    """The experts and weights of the tokens in one layer, and their rows sorted by `moe_align`."""

    def __init__(self, weights: Tensor, experts: Tensor, aligned: tuple[Tensor, Tensor, Tensor], block: int) -> None:
        self.weights, self.experts, self.block = weights, experts, block
        self.rows, self.block_experts, self.padded = aligned

    def each_token_once(self) -> MoeRouting:
        """The routing for the second GEMM, whose input has one row for each pair of token and expert."""
        return MoeRouting(
            self.weights.reshape(-1, 1),
            self.experts.reshape(-1, 1),
            (self.rows, self.block_experts, self.padded),
            self.block,
        )


def align_buffers(experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised buffers for the results of `moe_align`, and its scratch of `count + 2` numbers.

    Sizes are as in sglang 0.5.23, srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py.
    """
    total = experts.numel()
    most = total * block if total < count + 1 else total + (count + 1) * (block - 1)
    most = (most + 3) // 4 * 4
    sizes = (most, -(-most // block), 1, count + 2)
    rows, blocks, padded, scratch = (torch.empty(n, dtype=torch.int32, device=experts.device) for n in sizes)
    return rows, blocks, padded, scratch


class PlainOps:
    """`StepOps` in PyTorch."""

    qknorm_rope_kv_store = None

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: D102
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:  # noqa: D102
        residual += x
        x.copy_(self.rmsnorm(residual, weight, eps))

    def qknorm(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:  # noqa: D102
        q.copy_(self.rmsnorm(q, q_weight, eps))
        k.copy_(self.rmsnorm(k, k_weight, eps))

    def rope_kv_store(self, *args: Tensor) -> None:  # noqa: D102
        q, k, v, k_pool, v_pool, cos_sin, positions, slots = args
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        for x in (q, k):
            a, b = x.float().chunk(2, dim=-1)
            x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        k_pool[slots] = k.flatten(1)
        v_pool[slots] = v.flatten(1)

    def silu_and_mul(self, x: Tensor) -> Tensor:  # noqa: D102
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def topk_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        weights, experts = logits.float().softmax(-1).topk(k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts.int()

    def moe_align(self, experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        flat = experts.flatten()
        rows: list[Tensor] = []
        blocks: list[int] = []
        for expert in range(count):
            mine = (flat == expert).nonzero().flatten().int()
            fill = -len(mine) % block
            rows.append(torch.nn.functional.pad(mine, (0, fill), value=flat.numel()))
            blocks += [expert] * ((len(mine) + fill) // block)
        found = torch.cat(rows)
        return found, torch.tensor(blocks, dtype=torch.int32), torch.tensor([len(found)], dtype=torch.int32)

    def moe_block(self, experts: int, width: int, tokens: int) -> int:  # noqa: ARG002, D102
        return PLAIN_BLOCK

    def moe_gemm(  # noqa: D102
        self, x: Tensor, weight: Tensor, out: Tensor, routing: MoeRouting, weighted: bool
    ) -> None:
        k, flat = routing.experts.shape[1], out.view(-1, out.shape[-1])
        filled = int(routing.padded) // routing.block  # what lies behind it is not written
        for number, expert in enumerate(routing.block_experts[:filled].tolist()):
            rows = routing.rows[number * routing.block : (number + 1) * routing.block].long()
            rows = rows[rows < routing.experts.numel()]
            product = x[rows // k] @ weight[expert].T
            flat[rows] = product * routing.weights.flatten()[rows, None].to(x.dtype) if weighted else product

    def topk_sum(self, x: Tensor) -> Tensor:  # noqa: D102
        return x.sum(1)

    def softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:  # noqa: D102
        return logits.float().div_(temperatures).softmax(-1)


class UpstreamOps:
    """`StepOps` by SGLang's kernels, from a tree that `kda_judge.arms.upstream` has verified."""

    qknorm_rope_kv_store = None

    def __init__(self, tree: Path, version: str) -> None:
        names = (
            *("layernorm.norm", "attention.rope", "activation.activation", "moe.moe_topk_softmax"),
            *("moe.moe_topk_sum", "moe.moe_align", "moe.fused_moe_triton_kernels"),
        )
        loaded = kernel_imports.load(tree, version, names)
        self._norm, self._rope, self._activation, self._softmax, self._sum, self._align, self._gemm = loaded
        self._tree = tree
        self._settings: dict[tuple[int, int], dict[int, dict[str, int]]] = {}

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: D102
        out = torch.empty_like(x)
        self._norm.rmsnorm(x, weight, out, eps)
        return out

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:  # noqa: D102
        self._norm.fused_add_rmsnorm(x, residual, weight, eps)

    def qknorm(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:  # noqa: D102
        self._norm.fused_inplace_qknorm(q, k, q_weight, k_weight, eps)

    def rope_kv_store(self, *args: Tensor) -> None:  # noqa: D102
        self._rope.apply_rope_inplace_with_kvcache(*args, is_neox=True)

    def silu_and_mul(self, x: Tensor) -> Tensor:  # noqa: D102
        made: Tensor = self._activation.silu_and_mul(x)
        return made

    def topk_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        weights = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
        experts = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
        self._softmax.topk_softmax(weights, experts, logits, renormalize=True)
        return weights, experts

    def moe_align(self, experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        rows, blocks, padded, scratch = align_buffers(experts, count, block)
        self._align.moe_align_block_size(experts, count + 1, block, rows, blocks, padded, scratch, True)
        return rows, blocks, padded

    def moe_gemm(  # noqa: D102
        self, x: Tensor, weight: Tensor, out: Tensor, routing: MoeRouting, weighted: bool
    ) -> None:
        import triton.language as tl

        experts = routing.experts
        settings = self._moe_settings(weight.shape[0], weight.shape[2], x.shape[0])
        self._gemm.invoke_fused_moe_kernel(
            *(x, weight, None, out, None, None, None, routing.weights, experts),
            *(routing.rows, routing.block_experts, routing.padded, weighted, experts.shape[1]),
            {**settings, "BLOCK_SIZE_M": routing.block},
            compute_type=getattr(tl, str(x.dtype).removeprefix("torch.")),
            **dict.fromkeys(
                ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
            ),
        )

    def moe_block(self, experts: int, width: int, tokens: int) -> int:  # noqa: D102
        return self._moe_settings(experts, width, tokens)["BLOCK_SIZE_M"]

    def _moe_settings(self, experts: int, width: int, tokens: int) -> dict[str, int]:
        """The kernel's configuration: the wheel's for this GPU at the nearest number of tokens, else its default."""
        tuned = self._tuned(experts, width)
        return tuned[min(tuned, key=lambda m: abs(m - tokens))]

    def _tuned(self, experts: int, width: int) -> dict[int, dict[str, int]]:
        """Tokens -> configuration; read once, as every layer asks."""
        if (experts, width) not in self._settings:
            gpu = torch.cuda.get_device_name().replace(" ", "_")
            found = sorted(self._tree.rglob(f"E={experts},N={width},device_name={gpu}.json"))
            by_tokens = json.loads(found[-1].read_text()) if found else {"1": DEFAULT_MOE_SETTINGS}
            self._settings[experts, width] = {int(m): settings for m, settings in by_tokens.items()}
        return self._settings[experts, width]

    def topk_sum(self, x: Tensor) -> Tensor:  # noqa: D102
        made: Tensor = self._sum.moe_topk_sum(x, torch.empty_like(x[:, 0]))
        return made

    def softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:  # noqa: D102
        # SGLang 0.5.23's own chain on NVIDIA: cast, divide, softmax
        return logits.float().div_(temperatures).softmax(-1)
