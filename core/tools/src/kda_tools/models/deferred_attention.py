"""Have one op norm and rotate q and k of an attention block, where the model runs several kernels.

Z-Image's attention norms q and k by one kernel each, rotates both by another one, and copies v out of the projection of
all three. Here a block's `forward` gives q and k to the op, and attention reads v where it lies. If the op refuses a
call, or the block is not as usual, what stood there before runs.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from .deferred_kept import kept
from .deferred_slices import ORIGINAL, Refused  # copies of the files are a package of another name

__all__ = ["ORIGINAL", "WAYS", "defer", "put", "take_back"]

HEAD = 128
"""Elements of a head that the model's fused norm takes; others go through statements that round in another way."""


def put(_module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Put the op `call` into these blocks; `name` is their kind, a key of `WAYS`."""
    for block in blocks:
        defer(block, name, op, call)


def take_back(_module: ModuleType, _name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`; what another task has put into a block before stays."""
    for block in blocks:
        _restore(block)


def defer(block: Any, name: str, _op: str, call: Callable[..., Any]) -> None:
    """Put the op into one block."""
    _restore(block)
    way = WAYS[name]
    key = (Forward, way, call, vars(block).get("forward") or type(block).forward)
    block.forward = kept(block, key, lambda: Forward(block, functools.partial(way, block, call)))


def _restore(block: Any) -> None:
    forward: Any = vars(block).get("forward")
    if isinstance(forward, Forward):
        del block.forward
        vars(block).update(forward.stood)


class Forward:
    """What stands in the place of a block's `forward`."""

    def __init__(self, block: Any, way: Callable[..., torch.Tensor]) -> None:
        self.stood = {name: value for name, value in vars(block).items() if name == "forward"}
        self._before = self.stood.get("forward") or functools.partial(type(block).forward, block)
        self._way = way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if torch.compiler.is_compiling():
            return self._before(*args, **kwargs)
        try:
            return self._way(*args, **kwargs)
        except Refused:  # if by the op, the projection is computed again: slower, and the result is the model's
            return self._before(*args, **kwargs)


def zimage(
    block: Any,
    call: Callable[..., Any],
    hidden_states: torch.Tensor,
    freqs_cis: Any = None,  # noqa: ARG001  # the model does not read it either, if there is a cache
    rope_cos_sin_cache: torch.Tensor | None = None,
    rope_positions: torch.Tensor | None = None,
    *others: Any,
    **for_attention: Any,
) -> torch.Tensor:
    """Z-Image's attention by `call(q, k, q_weight, k_weight, cos_sin, eps)`."""
    usual = block.qk_norm and block.use_fused_qkv and block.enable_zimage_qk_fusion and not others
    if not usual or rope_cos_sin_cache is None or hidden_states.dim() != 3:
        raise Refused
    q_norm, k_norm, heads = block.norm_q, block.norm_k, block.local_num_heads
    dtypes = {hidden_states.dtype, q_norm.weight.dtype, k_norm.weight.dtype}
    # Positions of the model number the tokens of the whole batch, without a gap; without them each clip begins at 0.
    rows = hidden_states.shape[:2].numel() if rope_positions is not None else hidden_states.shape[1]
    if (
        (heads, q_norm.variance_epsilon) != (block.local_num_kv_heads, k_norm.variance_epsilon)
        or {type(q_norm).__name__, type(k_norm).__name__} != {"ZImageRMSNorm"}
        or (dtypes, block.head_dim) != ({torch.bfloat16}, HEAD)
        or rope_cos_sin_cache.shape != (rows, HEAD)
    ):
        raise Refused
    q, k, v = block.to_qkv(hidden_states)[0].unflatten(-1, (3, heads, HEAD)).unbind(2)
    q, k = call(q, k, q_norm.weight, k_norm.weight, rope_cos_sin_cache, q_norm.variance_epsilon)
    own = block.attn(q, k, v.contiguous() if _several_processes() else v, **for_attention)
    return block.to_out[0](own.flatten(2))[0]  # type: ignore[no-any-return]


WAYS = {"zimage": zimage}
"""Kind of a block: its computation by the op."""


def _several_processes() -> bool:
    """Whether processes may exchange heads or tokens of v, which need it in one piece."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
