"""Have one op repeat the edges of a clip before a causal convolution, and do the upsampling before it.

HunyuanVideo's VAE pads in front of every convolution by `F.pad`. Where it upsamples, `F.interpolate` and `torch.cat`
write what `F.pad` reads. Both classes' `forward` gives its tensor to an op here, and the result to the convolution. If
the op refuses a call, or the padding is another one, the class's own `forward` runs.

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

WAYS = ("time_causal_padding",)
"""Attribute of the convolution's class: columns at either side, lines at either side, frames before and after."""


def put(
    _module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., torch.Tensor]
) -> None:
    """Put the op `call` into these blocks: convolutions, or layers that upsample and hold one as `conv`."""
    for block in blocks:
        defer(block, name, op, call)


def take_back(_module: ModuleType, _name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`."""
    for block in blocks:
        vars(block).pop("forward", None)


def defer(block: Any, name: str, _op: str, call: Callable[..., torch.Tensor]) -> None:
    """Put the op into one block."""
    own = functools.partial(type(block).forward, block)
    upsamples = not hasattr(block, name)
    convolution = block.conv if upsamples else block

    def forward(x: torch.Tensor) -> Any:
        left, right, above, below, before, after = padding = getattr(convolution, name)
        usual = convolution.pad_mode == "replicate" and (left, above, 0) == (right, below, after) and any(padding)
        shared = getattr(convolution, "spatial_parallel", False)  # among several GPUs; not in 0.5.12.post1
        factors = block.upsample_factor if upsamples else (1, 1, 1)
        if torch.compiler.is_compiling() or not usual or shared or factors[1] != factors[2]:
            return own(x)
        try:
            padded = call(x, *(factors[:2] if upsamples else ()), before, above, left)
        except Refused:
            return own(x)
        return convolution.conv(padded)

    block.forward = forward
