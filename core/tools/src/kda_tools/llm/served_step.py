"""Run one step of a language model as a server does, with random weights, one operation after the other.

The projections of q, k and v are merged, and so are those of gate and up. The residual is carried beside the hidden
state. Keys and values of a layer are in pools, and a tensor of slots has the place of each token. Two operations are
stand-ins, which their names say: attention is PyTorch's over a contiguous view of the pool (a server's is paged), and
`torch.multinomial` draws the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import functional

from kda_tools.llm.known_llms import Config
from kda_tools.llm.served_names import PREFIX, STAND_INS
from kda_tools.llm.step_ops import MoeRouting, StepOps

SPREAD = 0.02
ATTENTION, DRAWING = STAND_INS
TEMPERATURE = 0.7
Result = TypeVar("Result")
Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
"""(dtype, shape, strides) of the tensors that an operation is called with."""


class Calls:
    """Runs operations under their names and, while `on`, counts what they are called with."""

    def __init__(self) -> None:
        self.on = False
        self.seen: Counter[tuple[str, Signature]] = Counter()

    def __call__(self, name: str, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args)."""
        if not self.on:
            return function(*args)
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        self.seen[name, tuple((str(x.dtype)[6:], tuple(x.shape), tuple(x.stride())) for x in tensors)] += 1
        with torch.profiler.record_function(PREFIX + name):
            return function(*args)


class ServedStep:
    """A model of `layers` layers, and its step."""

    def __init__(
        self, config: Config, layers: int, ops: StepOps, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self.config, self.ops, self.calls = config, ops, Calls()
        self.device, self.dtype = device, dtype
        self._draw = torch.Generator(device).manual_seed(seed)
        assert config.kv_heads is not None
        assert config.head_dim is not None
        assert config.rms_norm_eps is not None
        self.width, self.eps = config.head_dim, config.rms_norm_eps
        self.q_size, self.kv_size = config.heads * self.width, config.kv_heads * self.width
        self.sizes = [self.q_size, self.kv_size, self.kv_size]
        hidden = config.hidden_size
        self.embedding = self._weights(config.vocab_size, hidden)
        self.head = self._weights(config.vocab_size, hidden)
        self.ones = torch.ones(hidden, device=device, dtype=dtype)
        self.head_ones = torch.ones(self.width, device=device, dtype=dtype)
        self.layers = [self._layer() for _ in range(layers)]

    def _weights(self, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._draw, device=self.device, dtype=self.dtype)
        return made.mul_(SPREAD)

    def _layer(self) -> dict[str, torch.Tensor]:
        config, hidden = self.config, self.config.hidden_size
        made = {
            "qkv": self._weights(self.q_size + 2 * self.kv_size, hidden),
            "o": self._weights(hidden, self.q_size),
        }
        if config.experts is None:
            assert config.intermediate_size is not None
            return made | {
                "gate_up": self._weights(2 * config.intermediate_size, hidden),
                "down": self._weights(hidden, config.intermediate_size),
            }
        assert config.moe_intermediate_size is not None
        return made | {
            "router": self._weights(config.experts, hidden),
            "experts_gate_up": self._weights(config.experts, 2 * config.moe_intermediate_size, hidden),
            "experts_down": self._weights(config.experts, hidden, config.moe_intermediate_size),
        }

    def step(self, batch: int, new: int, kv: int) -> Callable[[], torch.Tensor]:
        """A step of `batch` sequences of `kv` tokens, the last `new` of each new; repeats give the same result.

        The step draws a token for each sequence, and returns the probabilities that it was drawn from.
        """
        config = self.config
        assert config.rope_theta is not None
        pools = [tuple(self._weights(batch * kv, self.kv_size) for _ in "kv") for _ in self.layers]
        inverse = config.rope_theta ** -(torch.arange(0, self.width, 2, device=self.device).float() / self.width)
        angles = torch.arange(kv, device=self.device).float()[:, None] * inverse
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        at = torch.arange(kv - new, kv, device=self.device)
        positions = at.repeat(batch)
        slots = (torch.arange(batch, device=self.device)[:, None] * kv + at).flatten()
        tokens = torch.randint(config.vocab_size, (batch * new,), generator=self._draw, device=self.device)
        temperatures = torch.full((batch, 1), TEMPERATURE, device=self.device)

        def run() -> torch.Tensor:
            h = self.calls("embedding", functional.embedding, tokens, self.embedding)
            residual: torch.Tensor | None = None
            for layer, pool in zip(self.layers, pools, strict=True):
                if residual is None:
                    residual, h = h, self.calls("rmsnorm", self.ops.rmsnorm, h, self.ones, self.eps)
                else:
                    self._add_norm(h, residual)
                h = self._attention(h, layer, pool, (cos_sin, positions, slots), batch, kv)
                self._add_norm(h, residual)
                h = self._experts(h, layer) if "router" in layer else self._mlp(h, layer)
            assert residual is not None
            self._add_norm(h, residual)
            last = h.view(batch, -1, h.shape[1])[:, -1]
            logits = self.calls("gemm", functional.linear, last, self.head)
            chances = self.calls("softmax_temperature", self.ops.softmax, logits, temperatures)
            self.calls(DRAWING, torch.multinomial, chances, 1)
            return chances

        return run

    def _add_norm(self, h: torch.Tensor, residual: torch.Tensor) -> None:
        self.calls("fused_add_rmsnorm", self.ops.fused_add_rmsnorm, h, residual, self.ones, self.eps)

    def _attention(
        self,
        h: torch.Tensor,
        layer: dict[str, torch.Tensor],
        pool: tuple[torch.Tensor, ...],
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: int,
        kv: int,
    ) -> torch.Tensor:
        merged = self.calls("gemm", functional.linear, h, layer["qkv"])
        q, k, v = (x.view(x.shape[0], -1, self.width) for x in torch.split(merged, self.sizes, -1))
        norm = (self.head_ones, self.head_ones, self.eps)
        if self.config.qk_norm and (both := self.ops.qknorm_rope_kv_store) is not None:
            self.calls("qknorm_rope_kv_store", both, q, k, v, *pool, *where, *norm)
        else:
            if self.config.qk_norm:
                self.calls("qknorm", self.ops.qknorm, q, k, *norm)
            self.calls("rope_kv_store", self.ops.rope_kv_store, q, k, v, *pool, *where)

        def attend(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
            keys, values = (x.view(batch, kv, -1, self.width).transpose(1, 2) for x in (k_pool, v_pool))
            queries = q.reshape(batch, -1, *q.shape[1:]).transpose(1, 2)
            causal = queries.shape[2] > 1  # either all tokens are new, or only one, which attends to all
            out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
            return out.transpose(1, 2).reshape(h.shape[0], -1)

        out = self.calls(ATTENTION, attend, q, *pool)
        return self.calls("gemm", functional.linear, out, layer["o"])

    def _mlp(self, h: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
        gate_up = self.calls("gemm", functional.linear, h, layer["gate_up"])
        inner = self.calls("silu_and_mul", self.ops.silu_and_mul, gate_up)
        return self.calls("gemm", functional.linear, inner, layer["down"])

    def _experts(self, h: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
        config, ops = self.config, self.ops
        count, k = config.experts, config.experts_per_token
        assert count is not None
        assert k is not None
        up, down = layer["experts_gate_up"], layer["experts_down"]
        block = ops.moe_block(count, down.shape[2], h.shape[0])
        logits = self.calls("gemm", functional.linear, h, layer["router"])
        weights, experts = self.calls("topk_softmax", ops.topk_softmax, logits, k)
        routing = MoeRouting(weights, experts, self.calls("moe_align", ops.moe_align, experts, count, block), block)
        gate_up = h.new_empty(h.shape[0], k, up.shape[1])
        self.calls("moe_gemm", ops.moe_gemm, h, up, gate_up, routing, False)
        inner = self.calls("silu_and_mul", ops.silu_and_mul, gate_up.flatten(0, 1))
        out = h.new_empty(h.shape[0], k, down.shape[1])
        self.calls("moe_gemm", ops.moe_gemm, inner, down, out, routing.each_token_once(), True)
        return self.calls("topk_sum", ops.topk_sum, out)
