"""Delay the sum of a residual and an update until the norm that follows it, so that one op can do both.

LTX-2's blocks add an attention's output to their hidden states, with a gate or without, norm the sum, and modulate the
norm: once, not at all, or twice with two pairs of scale and shift. Here the addition returns a `Sum`, which waits. The
norm gives it to an op, which returns the sum too. The norm that is modulated twice waits as a `Norm`. Its first
modulation gets scale and shift of the second one from the block's `get_ada_values`, which made all four at once.
Whatever else gets a `Sum` or a `Norm` gets the tensor. If an op refuses a call, the module's own functions run.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from .deferred_kept import kept
from .deferred_slices import MADE_BY, ORIGINAL, Refused, refuse  # copies of the files are a package of another name

__all__ = ["ORIGINAL", "WAYS", "defer", "put", "take_back"]

MODULATE = "rounded_rmsnorm_modulate"
"""The op of x, scale, shift, eps: a tensor's norm, modulated."""
RESIDUAL = "rounded_residual_rmsnorm_modulate"
"""The op of residual, x, gate, scale, shift, eps: the sum's norm, modulated if there is a scale, and the sum."""
TWICE = "rounded_residual_rmsnorm_modulate2"
"""The op of residual, x, gate, scale, shift, other_scale, other_shift, eps: the norm, modulated twice, and the sum."""
BOTH = 4
"""Values that a block makes for two modulations: two pairs of scale and shift."""


class Run:
    """One call of a block's `forward`."""

    __slots__ = ("calls", "norms_alone", "values")

    def __init__(self, calls: Mapping[str, Callable[..., Any]], norms_alone: bool) -> None:
        self.calls = calls
        self.norms_alone = norms_alone
        """Whether the norm of a sum with a gate, if asked for by itself, stays without modulation."""
        self.values: dict[int, Any] = {}
        """Id of the first scale of two modulations -> all four values; held, so that no other tensor has the id."""


class _Running(threading.local):
    """The blocks that run in this thread."""

    def __init__(self) -> None:
        self.runs: list[Run] = []


_running = _Running()


class Waiting:
    """A tensor that is not computed yet. What the model asks of its shape and dtype computes nothing.

    Other names here are none that tensors have.
    """

    __slots__ = ()

    like: torch.Tensor
    """A tensor of the same shape, dtype and device."""

    def tensor(self) -> torch.Tensor:
        """The tensor; computed once."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """As a tensor's, like the others here."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def ndim(self) -> int:
        return self.like.ndim

    def dim(self) -> int:
        return self.like.dim()

    def size(self, *dimension: Any) -> Any:
        return self.like.size(*dimension)

    def is_contiguous(self) -> bool:
        return self.like.is_contiguous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in place of `func`, which got one of these."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.rms_norm and args and type(args[0]) is Sum:
            found = args[0].normed_later(*args[1:], **kwargs)
            if found is not None:
                return found
        return func(*map(_made, args), **{name: _made(value) for name, value in kwargs.items()})


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Waiting, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_made, others))

    return operate


# Python looks for operators in the class alone, so `__getattr__` does not find them.
for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "neg", "iter", "len"):
    setattr(Waiting, f"__{_name}__", _operator(f"__{_name}__"))


class Sum(Waiting):
    """residual + x * gate, or residual + x with gate None."""

    __slots__ = ("gate", "like", "made", "own", "run", "x")

    def __init__(self, run: Run, own: Callable[..., Any] | None, residual: torch.Tensor, x: Any, gate: Any) -> None:
        self.run, self.own, self.like, self.x, self.gate = run, own, residual, x, gate
        self.made: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self.made is None:
            whole = self.like + self.x if self.own is None else self.own(self.like, self.x, self.gate)
            return self.keep(whole)
        return self.made

    def keep(self, made: torch.Tensor) -> torch.Tensor:
        """Keep the sum, which something has computed, and let go of what it was made from."""
        self.like = self.made = made
        self.x = self.gate = None
        return made

    def __add__(self, other: Any) -> Any:
        residual = self.tensor()
        if isinstance(other, torch.Tensor) and other.shape == residual.shape and other.dtype is residual.dtype:
            return Sum(self.run, None, residual, other, None)
        return residual + _made(other)

    def normed_later(self, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        """What `rms_norm` returns for it; None if that is to get the tensor."""
        if self.made is not None or weight is not None or eps is None or tuple(shape) != self.like.shape[-1:]:
            return None
        return self.normed(eps) if self.run.norms_alone and self.gate is not None else Norm(self, eps)

    def normed(self, eps: float) -> torch.Tensor:
        """Its norm."""
        if self.made is None:
            try:
                y, made = self.run.calls.get(RESIDUAL, refuse)(self.like, self.x, self.gate, None, None, eps)
                self.keep(made)
                return y  # type: ignore[no-any-return]
            except Refused:
                pass
        # A norm that has waited would meet an autocast that the model's layer turns off.
        with torch.autocast(self.like.device.type, enabled=False):
            return torch.nn.functional.rms_norm(self.tensor(), self.like.shape[-1:], eps=eps)


class Norm(Waiting):
    """The norm of a sum."""

    __slots__ = ("eps", "made", "other", "whole")

    def __init__(self, whole: Sum, eps: float) -> None:
        self.whole, self.eps = whole, eps
        self.made: torch.Tensor | None = None
        self.other: tuple[Any, Any, torch.Tensor] | None = None
        """Scale, shift and result of the modulation that is still to come."""

    @property
    def like(self) -> torch.Tensor:  # type: ignore[override]
        return self.whole.like

    def tensor(self) -> torch.Tensor:
        if self.made is None:
            self.made = self.whole.normed(self.eps)
        return self.made

    def modulated(self, own: Callable[..., Any], scale: Any, shift: Any) -> Any:
        """Its modulation: of two, the first call computes both."""
        other, whole = self.other, self.whole
        if other is not None and other[0] is scale and other[1] is shift:
            self.other = None
            return other[2]
        values = whole.run.values.get(id(scale))
        if values is not None and values[1] is shift and whole.made is None and _rows(whole.like, *values):
            try:
                op = whole.run.calls.get(TWICE, refuse)
                y, second, made = op(whole.like, whole.x, whole.gate, *values, self.eps)
                whole.keep(made)
                self.other = (values[2], values[3], second)
                return y
            except Refused:
                pass
        return own(self.tensor(), scale, shift)


def _made(value: Any) -> Any:
    """`value` with the tensor of everything in it that waits."""
    if type(value) is torch.Tensor:
        return value
    if isinstance(value, Waiting):
        return value.tensor()
    return type(value)(map(_made, value)) if type(value) in (list, tuple) else value


def _rows(x: Any, *operands: torch.Tensor) -> bool:
    """Whether the ops have a meaning for these: one row for each clip of the batch. A row for each token is another."""
    if x.ndim != 3:
        return False
    (batch, _, columns), dtype = x.shape, x.dtype
    row = batch, 1, columns
    for operand in operands:  # noqa: SIM110  # a generator takes longer, and a step has thousands of these calls
        if operand.shape != row or operand.dtype is not dtype:
            return False
    return True


# ---- what stands in the place of the module's functions; outside of a block that runs, they are the module's own


def _residual_gate_add(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def add(residual: Any, update: Any, gate: Any) -> Any:
        if torch.compiler.is_compiling() or not (runs := _running.runs):
            return own(residual, update, gate)
        residual, update = _made(residual), _made(update)
        if update.shape == residual.shape and update.dtype is residual.dtype and _rows(residual, gate):
            return Sum(runs[-1], own, residual, update, gate)
        return own(residual, update, gate)

    return add


def _rms_norm_modulate(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def norm(block: Any, rms_norm: Any, x: Any, scale: Any, shift: Any, eps: float) -> Any:
        if torch.compiler.is_compiling() or not (runs := _running.runs):
            return own(block, rms_norm, x, scale, shift, eps)
        if _rows(x, scale, shift):
            calls = runs[-1].calls
            try:
                if type(x) is Sum and x.made is None:
                    y, made = calls.get(RESIDUAL, refuse)(x.like, x.x, x.gate, scale, shift, eps)
                    x.keep(made)
                    return y
                return calls.get(MODULATE, refuse)(_made(x), scale, shift, eps)
            except Refused:
                pass
        return own(block, rms_norm, _made(x), scale, shift, eps)

    return norm


def _modulate(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def modulate(x: Any, scale: Any, shift: Any) -> Any:
        return x.modulated(own, scale, shift) if type(x) is Norm else own(_made(x), scale, shift)

    return modulate


WAYS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "ltx2": {
        "residual_gate_add": _residual_gate_add,
        "_ltx2_rms_norm_modulate": _rms_norm_modulate,
        "_ltx2_modulate": _modulate,
    }
}
"""Model -> functions of its module -> what stands in the place of each, made of it."""
VALUES = "get_ada_values"
"""The block's function that makes scales and shifts."""


class Forward:
    """What stands in the place of a block's `forward`."""

    def __init__(self, block: Any, stood: Mapping[str, Any]) -> None:
        self.stood = stood
        """The block's own attributes of these names."""
        self.calls: dict[str, Callable[..., Any]] = {}
        self._block = block
        self._before = stood.get("forward") or functools.partial(type(block).forward, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs, as tensors."""
        if torch.compiler.is_compiling():
            return self._before(*args, **kwargs)
        runs = _running.runs
        runs.append(Run(self.calls, not getattr(self._block, "cross_attention_adaln", False)))
        try:
            return _made(self._before(*args, **kwargs))
        finally:
            runs.pop()


def _remembering(block: Any, stood: Mapping[str, Any]) -> Callable[..., Any]:
    """The block's `get_ada_values`, which leaves the values of two modulations with the block that runs."""
    own = stood.get(VALUES) or functools.partial(getattr(type(block), VALUES), block)

    def values(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        if not torch.compiler.is_compiling() and len(found) == BOTH and _running.runs:
            _running.runs[-1].values[id(found[0])] = found
        return found

    return values


def put(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Put the op `call` into these blocks, and what waits into the module of the model `name`."""
    for place, make in WAYS[name].items():
        own = getattr(module, place)
        if not hasattr(own, MADE_BY):
            made = kept(module, (make, own), functools.partial(make, own))
            setattr(made, MADE_BY, own)
            setattr(module, place, made)
    for block in blocks:
        defer(block, name, op, call)


def take_back(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops; what another task has put into a block before stays."""
    for place in WAYS[name]:
        made = getattr(module, place)
        setattr(module, place, getattr(made, MADE_BY, made))
    for block in blocks:
        forward = vars(block).get("forward")
        if isinstance(forward, Forward):
            forward.calls.clear()
            for place in ("forward", VALUES):
                vars(block).pop(place, None)
            vars(block).update(forward.stood)


def defer(block: Any, _name: str, op: str, call: Callable[..., Any]) -> None:
    """Put the op into one block; ops that were added before stay."""
    forward = vars(block).get("forward")
    if not isinstance(forward, Forward):
        stood = {place: vars(block)[place] for place in ("forward", VALUES) if place in vars(block)}
        before = [stood.get(place) or getattr(type(block), place, None) for place in ("forward", VALUES)]
        forward = block.forward = kept(block, (Forward, *before), lambda: Forward(block, stood))
        if before[1] is not None:
            setattr(block, VALUES, kept(block, (_remembering, before[1]), lambda: _remembering(block, stood)))
    forward.calls[op] = call
