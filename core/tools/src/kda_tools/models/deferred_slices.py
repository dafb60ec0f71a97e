"""Delay the sum table + temb of modulation slices, so that ops can add the two when they use a slice.

Wan's block makes six slices of one tensor and passes them to its layers, as shift, scale and gate. Here it gets
`Slice` objects instead, and the layers of `LAYERS` give them to an op. If no op takes the call, the layer gets the
tensors, as in the original model. Other code of the block only reads a slice's dtype, and the hash of the class's file
is pinned.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

Calls = Mapping[str, Callable[..., Any]]
"""The ops by their names."""
CALLS, MADE_BY = "_kda_calls", "_kda_made_by"
"""Attributes: a block's ops, and what stood where a function of ours stands."""


class Refused(Exception):
    """No op takes this call."""


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """An op that takes no call."""
    raise Refused


ORIGINAL = refuse
"""What a call runs that the op does not take: the block's own statements."""


class Slice(NamedTuple):
    """Row `number` of a table [1, K, D], to be added to the same row of every token in temb [B, S, K, D]."""

    table: torch.Tensor
    temb: torch.Tensor
    number: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        return torch.float32

    def tensor(self) -> torch.Tensor:
        """[B, S, D], as upstream's kernel leaves it."""
        return (self.table[:, None, self.number].float() + self.temb[:, :, self.number].float()).contiguous()


def put(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Make the module's function `name` return `Slice` objects, and the layers of the blocks give them to an op."""
    make = getattr(module, name)
    if not hasattr(make, MADE_BY):
        setattr(module, name, _deferring(make))
    for block in blocks:
        defer(block, name, op, call)


def take_back(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops."""
    make = getattr(module, name)
    setattr(module, name, getattr(make, MADE_BY, make))
    for block in blocks:
        if vars(block).pop(CALLS, None) is not None:
            for layer in block.children():
                vars(layer).pop("forward", None)


def defer(block: torch.nn.Module, _name: str, op: str, call: Callable[..., Any]) -> None:
    """Make the block's layers give their slices to this op too; ops that were added before stay."""
    calls = vars(block).setdefault(CALLS, {})
    calls[op] = call
    for layer in block.children():
        if (handler := LAYERS.get(type(layer).__name__)) is not None:
            layer.forward = _forward(layer, functools.partial(handler, layer, calls))


def _deferring(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make(table, temb)`, whose slices wait; for torch.compile it is `make`."""

    @functools.wraps(make)
    def slices(table: torch.Tensor, temb: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or temb.dim() != 4:
            return make(table, temb)
        return tuple(Slice(table, temb, number) for number in range(temb.shape[2]))

    setattr(slices, MADE_BY, make)
    return slices


def _forward(layer: torch.nn.Module, handler: Callable[..., Any]) -> Callable[..., Any]:
    own = functools.partial(type(layer).forward, layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Slice) for value in (*args, *kwargs.values())):
            return own(*args, **kwargs)
        try:
            return handler(*args, **kwargs)
        except Refused:
            return own(*map(_made, args), **{name: _made(value) for name, value in kwargs.items()})

    return forward


def _made(value: Any) -> Any:
    return value.tensor() if isinstance(value, Slice) else value


def _norm(layer: Any, calls: Calls, x: torch.Tensor, shift: Any, scale: Any) -> Any:
    if not (_pair(shift, scale) and layer.norm_type == "layer" and _affine(layer) == (None, None)):
        raise Refused
    return calls.get("temb_norm_scale_shift", refuse)(x, shift.temb, shift.table, shift.number, scale.number, layer.eps)


def _residual_norm(
    layer: Any, calls: Calls, residual: torch.Tensor, x: torch.Tensor, gate: Any, shift: Any, scale: Any
) -> Any:
    gated, modulated = isinstance(gate, Slice), _pair(shift, scale)
    # The block's way to say that it wants no modulation: one tensor, a single zero, as both.
    plain = shift is scale and isinstance(shift, torch.Tensor) and shift.numel() == 1
    known = (gated or (isinstance(gate, int) and gate == 1)) and (modulated or plain) and layer.norm_type == "layer"
    if not known or (gated and modulated and gate.temb is not shift.temb):
        raise Refused
    numbers = {"gate": gate.number} if gated else {}
    numbers |= {"shift": shift.number, "scale": scale.number} if modulated else {}
    return calls.get("temb_residual_norm_scale_shift", refuse)(
        residual,
        x,
        (gate if gated else shift).temb,
        gate.table if gated else None,
        shift.table if modulated else None,
        *_affine(layer),
        eps=layer.eps,
        **numbers,
    )


def _multiply_add(_layer: Any, calls: Calls, a: torch.Tensor, b: Any, c: torch.Tensor, k: int = 0) -> Any:
    if k or not isinstance(b, Slice):
        raise Refused
    return calls.get("temb_residual", refuse)(c, a, b.temb, b.table, b.number)


def _pair(shift: Any, scale: Any) -> bool:
    """Whether these are slices of one sum."""
    both = isinstance(shift, Slice) and isinstance(scale, Slice)
    return both and shift.table is scale.table and shift.temb is scale.temb


def _affine(layer: Any) -> tuple[Any, Any]:
    return getattr(layer.norm, "weight", None), getattr(layer.norm, "bias", None)


LAYERS: Mapping[str, Callable[..., Any]] = {
    "LayerNormScaleShift": _norm,
    "ScaleResidualLayerNormScaleShift": _residual_norm,
    "MulAdd": _multiply_add,
}
"""Class of a layer -> what gives its call to an op."""
