"""Keep a clip in channels-last order from one convolution to the next, with the ops that such clips have.

HunyuanVideo's VAE has its clips in the order [B, C, T, H, W], and cuDNN converts them for each convolution and back.
Here a block's `forward` gives its clip to an op in the order [B, T, H, W, C], and the result to the convolution.
PyTorch's convolution then returns that order, which the next block finds. Weights are converted once, in a copy; the
model's own stay as they are. If an op refuses a call, or the block is not as usual, the function that stood there
before runs: the class's own `forward`, or another op's.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from .deferred_slices import ORIGINAL, Refused  # a copy of both files is a package of another name

__all__ = ["ORIGINAL", "WAYS", "defer", "put", "take_back"]

LAST = torch.channels_last_3d
Call = Callable[..., torch.Tensor]


def put(_module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Call) -> None:
    """Put the op `call` into these blocks; `name` is their kind, a key of `WAYS`."""
    for block in blocks:
        defer(block, name, op, call)


def take_back(_module: ModuleType, _name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`; what another task has put into a block stays."""
    for block in blocks:
        if _is_ours(vars(block).get("forward")):
            del block.forward


def defer(block: Any, name: str, _op: str, call: Call) -> None:
    """Put the op into one block."""
    before = vars(block).get("forward")
    if before is None or _is_ours(before):
        before = functools.partial(type(block).forward, block)
    block.forward = _forward(block, before, WAYS[name], call)


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", None) == __name__


def _forward(
    block: Any, before: Call, run: Callable[[Any, torch.Tensor, Call, Weights], torch.Tensor], call: Call
) -> Call:
    weights = Weights()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return before(x)
        try:
            return run(block, x, call, weights)
        except Refused:
            return before(x)

    return forward


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


def residual(block: Any, x: torch.Tensor, call: Call, weights: Weights) -> torch.Tensor:
    """Two times norm, SiLU, padding and convolution, and x or its shortcut added."""
    shortcut = block.conv_shortcut
    if type(block.nonlinearity) is not torch.nn.SiLU or any(map(_shared, (block, block.conv1, block.conv2))):
        raise Refused
    if (shortcut is not None and any(shortcut.time_causal_padding)) or (block.training and block.dropout.p):
        raise Refused
    if any(type(norm) is not torch.nn.GroupNorm or norm.weight is None for norm in (block.norm1, block.norm2)):
        raise Refused

    def padded(y: torch.Tensor, y_bias: torch.Tensor | None, norm: Any, convolution: Any) -> torch.Tensor:
        return call(_last(y), norm.weight, norm.bias, y_bias, norm.num_groups, norm.eps, *_margins(convolution))

    x = x.contiguous(memory_format=LAST)  # here, so that a shortcut has that order, too
    first, second = block.conv1.conv, block.conv2.conv
    y = _convolved(first, padded(x, None, block.norm1, block.conv1), weights, None)
    # The second norm adds the bias that the first convolution has left out.
    y = _convolved(second, padded(y, first.bias, block.norm2, block.conv2), weights, second.bias)
    return y + (x if shortcut is None else shortcut.conv(x))


def upsampling(block: Any, x: torch.Tensor, call: Call, weights: Weights) -> torch.Tensor:
    """Upsampling, padding and convolution."""
    frames, lines, columns = block.upsample_factor
    if lines != columns or _shared(block.conv):
        raise Refused
    padded = call(_last(x), frames, lines, *_margins(block.conv))
    return _convolved(block.conv.conv, padded, weights, block.conv.conv.bias)


WAYS = {"residual": residual, "upsampling": upsampling}
"""Kind of a block: its computation by the op."""


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
    return x.contiguous(memory_format=LAST).permute(0, 2, 3, 4, 1)


def _convolved(own: torch.nn.Conv3d, padded: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution of a clip [B, T, H, W, C], as [B, C, T, H, W] in channels-last order."""
    x = padded.permute(0, 4, 1, 2, 3)
    return torch.nn.functional.conv3d(x, weights.of(own), bias, own.stride, own.padding, own.dilation, own.groups)
