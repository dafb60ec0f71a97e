"""Delay a tanh GELU until the `torch.cat` that follows it, so that one op can do both.

Some models call no function that an op could replace, but run two statements: a module's GELU of one tensor, then
`torch.cat` of another tensor and the result. `defer` replaces the GELU by a module that only remembers its argument and
returns a `Pending`. If `torch.cat` gets this object, the op is called. If any other PyTorch function gets it, the GELU
is computed first, as in the original model.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The op: of what stands before, and of the GELU's argument."""


def chain(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """The two original statements: attn, then the GELU of mlp, concatenated along the last dimension."""
    return torch.cat((attn, torch.nn.functional.gelu(mlp, approximate="tanh")), dim=-1)


class Pending:
    """The GELU of `x`, not yet computed. PyTorch functions that get one call `__torch_function__`."""

    def __init__(self, x: torch.Tensor, activation: torch.nn.Module, call: Call) -> None:
        self.x, self.activation, self.call = x, activation, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.activation(self.x), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in place of `func`, which got one of these."""
        if func is torch.cat and (found := cls._fused_cat(*args, **(kwargs or {}))) is not None:
            return found
        return func(*map(_computed, args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    @staticmethod
    def _fused_cat(tensors: Any = (), dim: Any = 0, **others: Any) -> torch.Tensor | None:
        """The op's result for this `torch.cat`; None if the arguments are not those that the op replaces."""
        if others or len(tensors) != 2 or not isinstance(tensors[0], torch.Tensor):
            return None
        first, second = tensors
        if not isinstance(second, Pending) or dim not in (-1, first.dim() - 1):
            return None
        return second.call(first, second.x)


class DeferredGelu(torch.nn.Module):
    """A module in place of a tanh GELU. Under torch.compile it runs that GELU."""

    def __init__(self, activation: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.activation, self.call = activation, call

    def forward(self, x: torch.Tensor) -> Any:
        """A `Pending` for the GELU of x."""
        if torch.compiler.is_compiling():
            return self.activation(x)
        return Pending(x, self.activation, self.call)


ORIGINAL = chain
"""What a call runs that the op does not take."""


def put(_module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Call) -> None:
    """Put the op `call` into these blocks."""
    for block in blocks:
        defer(block, name, op, call)


def take_back(_module: ModuleType, name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`."""
    for block in blocks:
        if hasattr(block, name):
            setattr(block, name, original(block, name))


def defer(block: torch.nn.Module, name: str, _op: str, call: Call) -> None:
    """Use `call` for the block's GELU, its module `name`, and the `torch.cat` that follows.

    The block of a quantised model may lack the module; it stays as it is.

    Raises:
        ValueError: the module is no tanh GELU; names it.
    """
    if not hasattr(block, name):
        return
    activation = original(block, name)
    if getattr(activation, "approximate", None) != "tanh":
        raise ValueError(f"{type(block).__name__}.{name}: expected a GELU with approximate='tanh', got {activation!r}")
    setattr(block, name, DeferredGelu(activation, call))


def original(block: torch.nn.Module, name: str) -> torch.nn.Module:
    """The block's own activation, even if a `DeferredGelu` is in its place."""
    module = getattr(block, name)
    activation: torch.nn.Module = module.activation if isinstance(module, DeferredGelu) else module
    return activation


def _computed(value: Any) -> Any:
    """`value` with every `Pending` in it computed."""
    if isinstance(value, Pending):
        return value.activation(value.x)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_computed, value))
    return value
