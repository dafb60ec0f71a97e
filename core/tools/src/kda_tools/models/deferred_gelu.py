"""A tanh GELU that waits for the `torch.cat` behind it, so that an op can do both.

In some models an op is no function but two statements: a module's GELU of one tensor, and `torch.cat` of another one
and its result. `defer` puts a module in the GELU's place which only remembers its argument. When `torch.cat` gets what
it returned, the op is called; when anything else of PyTorch does, the GELU is computed first, as if nothing had been.

Imports PyTorch alone: `kda apply` copies this file beside the solutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The op: of what stands before, and of the GELU's argument."""


def chain(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """What the two statements do: attn, and behind it the GELU of mlp, along the last dimension."""
    return torch.cat((attn, torch.nn.functional.gelu(mlp, approximate="tanh")), dim=-1)


class Pending:
    """The GELU of `x`, which nobody has computed yet. PyTorch asks it what a call with it means."""

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
        """What the op makes of this `torch.cat`; None where it is another one than the op's."""
        if others or len(tensors) != 2 or not isinstance(tensors[0], torch.Tensor):
            return None
        first, second = tensors
        if not isinstance(second, Pending) or dim not in (-1, first.dim() - 1):
            return None
        return second.call(first, second.x)


class DeferredGelu(torch.nn.Module):
    """In the place of a tanh GELU. For torch.compile it is that GELU."""

    def __init__(self, activation: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.activation, self.call = activation, call

    def forward(self, x: torch.Tensor) -> Any:
        """The GELU of x, later."""
        if torch.compiler.is_compiling():
            return self.activation(x)
        return Pending(x, self.activation, self.call)


def defer(block: torch.nn.Module, name: str, call: Call) -> None:
    """Put `call` where `block` activates by its module `name` and appends the result to something.

    Raises:
        ValueError: the module is no tanh GELU; names it.
    """
    activation = original(block, name)
    if getattr(activation, "approximate", None) != "tanh":
        raise ValueError(f"{type(block).__name__}.{name}: expected a GELU with approximate='tanh', got {activation!r}")
    setattr(block, name, DeferredGelu(activation, call))


def original(block: torch.nn.Module, name: str) -> torch.nn.Module:
    """The block's own module, whatever stands in its place."""
    module = getattr(block, name)
    activation: torch.nn.Module = module.activation if isinstance(module, DeferredGelu) else module
    return activation


def _computed(value: Any) -> Any:
    """`value` with what is pending in it computed."""
    if isinstance(value, Pending):
        return value.activation(value.x)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_computed, value))
    return value
