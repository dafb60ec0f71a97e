"""Keep a clip in channels-last order from one convolution to the next, with the ops that such clips have.

HunyuanVideo's VAE has its clips in the order [B, C, T, H, W], and cuDNN converts them for each convolution and back.
Here a block's `forward` gives its clip to an op in the order [B, T, H, W, C], and the result to the convolution.
PyTorch's convolution then returns that order, which the next block finds. Weights are converted once, in a copy; the
model's own stay as they are. If an op refuses a call, or the block is not as usual, the function that stood there
before runs: the class's own `forward`, or another op's.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from . import deferred_lines  # a copy of both files is a package of another name
from .deferred_lines import ORIGINAL, Refused, refuse

__all__ = ["ORIGINAL", "WAYS", "defer", "put", "take_back"]

LAST = torch.channels_last_3d
Calls = Mapping[str, Callable[..., torch.Tensor]]
"""The ops by their names."""


LAYOUT = "_kda_layout"
"""Attribute of a block: its `Layout`."""


def put(
    _module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., torch.Tensor]
) -> None:
    """Put the op `call` into these blocks; `name` is their kind, a key of `WAYS`."""
    for block in blocks:
        defer(block, name, op, call)


def take_back(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops; what another task has put into a block stays."""
    for block in blocks:
        vars(block).pop(LAYOUT, None)
        deferred_lines.take_back(module, _lines(name), (block,))


def defer(block: Any, name: str, op: str, call: Callable[..., torch.Tensor]) -> None:
    """Put the op into one block; ops that were added before stay."""
    layout = vars(block).setdefault(LAYOUT, Layout(block, WAYS[name]))
    layout.calls[op] = call
    deferred_lines.defer(block, _lines(name), name, layout)


def _lines(name: str) -> str:
    return f"return {name}(hidden_states)"


class Weights:
    """Copies of convolutions' weights in channels-last order, for as long as the weights do not change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, int], torch.Tensor]] = {}

    def of(self, convolution: torch.nn.Conv3d) -> torch.Tensor:
        """The copy of this convolution's weight."""
        weight = convolution.weight
        state = weight.data_ptr(), weight._version
        known = self._known.get(id(convolution))
        if known is None or known[0] != state:
            known = self._known[id(convolution)] = state, weight.detach().contiguous(memory_format=LAST)
        return known[1]


class Layout:
    """The computation of one block."""

    def __init__(self, block: Any, run: Callable[[Any, torch.Tensor, Calls, Weights], torch.Tensor]) -> None:
        self.calls: dict[str, Callable[..., torch.Tensor]] = {}
        self._block, self._run, self._weights = block, run, Weights()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for the clip x, [B, C, T, H, W]."""
        return self._run(self._block, x, self.calls, self._weights)


# ---- kinds of blocks: their computation


def residual(block: Any, x: torch.Tensor, calls: Calls, weights: Weights) -> torch.Tensor:
    """Two times norm, SiLU, padding and convolution, and x or its shortcut added."""
    shortcut = block.conv_shortcut
    if type(block.nonlinearity) is not torch.nn.SiLU or any(map(_shared, (block, block.conv1, block.conv2))):
        raise Refused
    if (shortcut is not None and any(shortcut.time_causal_padding)) or (block.training and block.dropout.p):
        raise Refused
    x, first, second = _last(x), block.conv1.conv, block.conv2.conv
    y = _convolved(first, _normed(calls, x, None, block.norm1, block.conv1), weights)
    # The second norm adds the bias that the first convolution has left out.
    y = _convolved(second, _normed(calls, y, first.bias, block.norm2, block.conv2), weights)
    if shortcut is None:
        return _sum(calls, y, second.bias, x, None)
    return _sum(calls, y, second.bias, _convolved(shortcut.conv, x, weights), shortcut.conv.bias)


def upsampling(block: Any, x: torch.Tensor, calls: Calls, weights: Weights) -> torch.Tensor:
    """Upsampling, padding and convolution."""
    frames, lines, columns = block.upsample_factor
    if lines != columns or _shared(block.conv):
        raise Refused
    return _padded(block.conv, x, frames, lines, calls, weights)


def padding(block: Any, x: torch.Tensor, calls: Calls, weights: Weights) -> torch.Tensor:
    """Padding and convolution of a clip that is in channels-last order already; the model's first clips are not."""
    ordered = x.is_contiguous(memory_format=LAST) and not x.is_contiguous()
    if not ordered or _shared(block) or not any(block.time_causal_padding):
        raise Refused
    return _padded(block, x, 1, 1, calls, weights)


def decoder(block: Any, x: torch.Tensor, calls: Calls, weights: Weights) -> torch.Tensor:
    """The blocks of a decoder, and norm, SiLU, padding and convolution of what they return."""
    checkpoints = torch.is_grad_enabled() and block.gradient_checkpointing
    if _shared(block) or checkpoints or type(block.conv_act) is not torch.nn.SiLU:
        raise Refused
    for part in (block.conv_in, block.mid_block, *block.up_blocks):
        x = part(x)
    own = block.conv_out.conv
    try:
        y = _convolved(own, _normed(calls, _last(x), None, block.conv_norm_out, block.conv_out), weights)
    except Refused:
        return block.conv_out(block.conv_act(block.conv_norm_out(x)))  # type: ignore[no-any-return]
    return _sum({}, y, own.bias, None, None).contiguous()  # as the model returns it


WAYS = {"residual": residual, "upsampling": upsampling, "padding": padding, "decoder": decoder}
"""Kind of a block: its computation by the ops."""


def _normed(calls: Calls, x: torch.Tensor, x_bias: torch.Tensor | None, norm: Any, convolution: Any) -> torch.Tensor:
    """Norm, SiLU and the convolution's padding."""
    if type(norm) is not torch.nn.GroupNorm or norm.weight is None:
        raise Refused
    call = _op(calls, "group_norm_silu_pad")
    return call(x, norm.weight, norm.bias, x_bias, norm.num_groups, norm.eps, *_margins(convolution))


def _padded(
    convolution: Any, x: torch.Tensor, frames: int, pixels: int, calls: Calls, weights: Weights
) -> torch.Tensor:
    """Upsampling by these factors, padding and convolution."""
    call = _op(calls, "upsample_pad")
    y = _convolved(convolution.conv, call(_last(x), frames, pixels, *_margins(convolution)), weights)
    return _sum(calls, y, convolution.conv.bias, None, None)


def _op(calls: Calls, name: str) -> Callable[..., torch.Tensor]:
    return calls.get(name, refuse)


def _shared(block: Any) -> bool:
    """Whether several GPUs share the lines of a clip; not in 0.5.12.post1."""
    return bool(getattr(block, "spatial_parallel", False))


def _margins(convolution: Any) -> tuple[int, int, int]:
    """Frames before, lines and columns at either side, as the ops take them."""
    left, right, above, below, before, after = convolution.time_causal_padding
    if convolution.pad_mode != "replicate" or (left, above, 0) != (right, below, after):
        raise Refused
    return before, above, left


def _last(x: torch.Tensor) -> torch.Tensor:
    """A clip [B, C, T, H, W] as [B, T, H, W, C]: the same memory, if its order is channels-last."""
    return x.permute(0, 2, 3, 4, 1).contiguous()


def _convolved(own: torch.nn.Conv3d, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """The convolution of [B, T, H, W, C] without its bias, which PyTorch would add in a kernel of its own."""
    x = x.permute(0, 4, 1, 2, 3)
    return _last(
        torch.nn.functional.conv3d(x, weights.of(own), None, own.stride, own.padding, own.dilation, own.groups)
    )


def _sum(
    calls: Calls,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
    other_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The sum of all that are given, by an op if one takes the call, as [B, C, T, H, W]."""
    with suppress(Refused):
        call = refuse if bias is None else _op(calls, "bias_residual")
        return call(y, bias, other, other_bias).permute(0, 4, 1, 2, 3)
    for summand in (bias, other, other_bias):
        y = y if summand is None else y + summand
    return y.permute(0, 4, 1, 2, 3)
