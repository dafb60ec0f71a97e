"""A public op around its kernels: what is decided once per signature of the arguments, and what every call does.

A solution says what is its own in five functions of a `Call`, the named tuple of an op's arguments, tensors first:

    check(call, expect)   raises a ValueError, through `expect`, for arguments that the op has no meaning for
    uncovered(call)       why the kernels do not take the call on any device, or None
    plan(call)            the `Launch` or `Chain` of a call that they take; its tensors may be on the meta device
    plain(call)           the same maths in PyTorch, for all other calls; what is written in place, it writes
    ready(call)           optional: the call with a copy of what the kernels cannot read as it is. It returns `call`
                          itself where there is nothing to copy, also where `call` is its own result

A second plan and plain path may give upstream's bits, at other roundings; `Op.set_exact` chooses between the two.

`Op` does the rest. A call whose signature is known goes to its **entry**, a function of the arguments that checks the
signature, allocates the outputs and launches. Tracers (torch.compile, FakeTensorMode) see a custom op with a fake.

    OP = Op("double", Call, kernel=double_kernel, plan=plan, plain=plain, check=check, outputs=("x",))


    @OP.public
    def double(x: torch.Tensor) -> torch.Tensor:
        return OP.call(x)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints
from weakref import WeakSet

import torch
from torch.compiler import is_dynamo_compiling

from kda_runtime.checks import Expect, check_tensors, elsewhere, expecting, given
from kda_runtime.launch import MISS, Chain, Launch, is_tracing
from kda_runtime.plans import Plans

try:
    from kda_runtime.bound import entry as make_entry
except ImportError:  # a plain export leaves the C launcher out: its calls take Triton's own
    from kda_runtime.plans import plain_entry as make_entry

C = TypeVar("C", bound=tuple[Any, ...])
"""A named tuple: the arguments of a call, tensors (or None) first, then scalars."""
F = TypeVar("F", bound=Callable[..., Any])

TYPES = {torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", bool: "bool", int: "int", float: "float", str: "str"}
"""Annotations of a `Call` as types of a custom op's schema."""
CALL = """
def call({names}):
    if not is_dynamo_compiling():
        result = plans.last({names})
        if result is not MISS:
            return result
        for entry in plans.hot:
            result = entry({names})
            if result is not MISS:
                return result
    return cold(({names},))
"""
"""`Op.call`, with its arguments by name: to pack and unpack them costs as much as half of what it does itself."""
INTO = "into"
"""How the custom op is called that writes into an argument instead of returning a tensor."""
_every: WeakSet[Op[Any]] = WeakSet()


def _nothing(_call: Any, _expect: Expect) -> None:
    """No argument is without meaning."""


def _none(_call: Any) -> None:
    """The kernels take every call."""


def _as_it_is(call: C) -> C:
    return call


@dataclass(frozen=True, eq=False)
class Op(Generic[C]):
    """One public op. The functions are the solution's own, see above."""

    refusal: ClassVar[type[Exception] | None] = None
    """Of all ops: what `call` raises, with the op and its call, where the kernels do not take it; None, it takes the
    plain path. Whoever has another function for such calls sets it, on the class. Graphs keep the plain path."""

    name: str
    arguments: type[C]
    _: KW_ONLY
    kernel: object
    """One of its Triton kernels: interpreted, it takes tensors on the CPU. None where there is none."""
    plan: Callable[[C], Launch | Chain]
    plain: Callable[[C], Any]
    check: Callable[[C, Expect], None] = _nothing
    uncovered: Callable[[C], str | None] = _none
    ready: Callable[[C], C] = _as_it_is
    outputs: Sequence[str | Callable[[C], torch.Tensor]] = ()
    """For each new tensor that is returned what it is `torch.empty_like`: an argument's name, or a function of the call
    that gives such a tensor, for example a view. Empty for ops in place."""
    contiguous: bool = False
    """The outputs are contiguous, whatever the strides of what they are like."""
    mutates: Sequence[str] = ()
    """Arguments that are written in place."""
    into: str | None = None
    """An optional argument that the result is written into, where it is given."""
    required: Collection[str] = ()
    """Arguments that may be None in `arguments`, but not in calls of this op."""
    integers: Collection[str] = ()
    """Tensors of integers or bool."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Arguments that the public function calls otherwise: own name -> public name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that the public function has not; None without an entry."""
    exact: tuple[Callable[[C], Launch | Chain], Callable[[C], Any]] | None = None
    """The plan and the plain path that give upstream's bits: `plan` and `plain` themselves where these do, None where
    nothing does. `set_exact` chooses them."""
    own: tuple[Callable[[C], Launch | Chain], Callable[[C], Any]] = field(init=False, repr=False)
    """`plan` and `plain` as they were given."""
    plans: Plans = field(default_factory=Plans, repr=False)
    """The entries that are known."""
    call: Callable[..., Any] = field(init=False, repr=False)
    """What the public function does, with the arguments in the order of `arguments`."""

    def __post_init__(self) -> None:
        _every.add(self)
        object.__setattr__(self, "own", (self.plan, self.plain))
        scope = {"is_dynamo_compiling": is_dynamo_compiling, "MISS": MISS, "plans": self.plans, "cold": self._cold}
        exec(CALL.format(names=", ".join(self.arguments._fields)), scope)  # type: ignore[attr-defined]
        object.__setattr__(self, "call", scope["call"])
        self._tensor_count  # noqa: B018  # an order of arguments that is wrong is said now
        # Tracers must find them registered, and cannot see through a property that is not there yet.
        self.registered  # noqa: B018
        if self.into is not None:
            self.registered_into  # noqa: B018

    # ---- calls

    def _cold(self, args: tuple[Any, ...]) -> Any:
        if is_dynamo_compiling() or is_tracing(*(arg for arg in args if isinstance(arg, torch.Tensor))):
            return self._registered_for(args)(*args)
        call = self.arguments(*args)
        if self.refusal is None:
            return self.run(call)
        result = self.attempt(call)
        if result is MISS:
            raise self.refusal(self, call)
        return result

    def run(self, call: C) -> Any:
        """Everything that a call with a hot entry skips: the kernels, or the plain path where they do not take it."""
        result = self.attempt(call)
        if result is not MISS:
            return result
        result = self.plain(call)
        return None if self._writes_into(call) else result

    def attempt(self, call: C, copied: bool = False) -> Any:
        """`run` without the plain path: MISS for a call that the kernels do not take, and nothing has been written.

        `copied`: the call is what `ready` gave.

        Raises:
            TypeError: `ready` gives another call also for what it gave.
        """
        tensors, scalars = self._split(call)
        result = self.plans.recall(tensors, scalars)
        if result is not MISS:
            return result
        self.check_call(call)
        if self.why_not(call) is not None or self._leading(call).numel() == 0:
            return MISS
        ready = self.ready(call)
        if ready is not call:
            if copied:
                raise TypeError(f"{self.name}: ready: expected its own result back when called with it, got a new call")
            return self.attempt(ready, copied=True)
        chain = self._chain(call)
        if self._on_gpu(call):
            entry = make_entry(chain, tensors, scalars)
            self.plans.add(tensors, scalars, entry)
            result = entry(*call)
            if result is not MISS:
                return result
        return chain.run(*tensors)

    def _chain(self, call: C) -> Chain:
        made = self.plan(call)
        if isinstance(made, Chain):
            return made
        outputs = () if self._writes_into(call) else [self._place(call, like) for like in self.outputs]
        return made.chain(len(given(call)), outputs)

    def _place(self, call: C, like: str | Callable[[C], torch.Tensor]) -> int | torch.Tensor:
        """Where a chain finds what an output is like: the argument's index, or a template without memory."""
        if isinstance(like, str):
            return int(call._fields.index(like))  # type: ignore[attr-defined]
        return torch.empty_like(like(call), device="meta", memory_format=self._layout)

    # ---- the setting

    def set_exact(self, exact: bool = True) -> None:
        """Whether all calls from now on give the bits of upstream's own function; entries that are known are forgotten.

        Raises:
            ValueError: the op has no such mode.
        """
        chosen = self.exact if exact else self.own
        if chosen is None:
            raise ValueError(f"{self.name}: expected an op with an exact mode; docs/dispatch.md says why it has none")
        for name, function in zip(("plan", "plain"), chosen, strict=True):
            object.__setattr__(self, name, function)
        self.plans.clear()

    # ---- what a call is

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """Name and annotation of every argument, in order."""
        return get_type_hints(self.arguments)

    @cached_property
    def _tensor_count(self) -> int:
        kinds = [hint in (torch.Tensor, torch.Tensor | None) for hint in self._hints.values()]
        if any(kinds[kinds.index(False) :] if False in kinds else ()):
            raise TypeError(f"{self.arguments.__name__}: expected tensors before all other arguments")
        return sum(kinds)

    @cached_property
    def _first(self) -> str:
        """The first tensor that every call has: its device and size are the call's."""
        return next(name for name, hint in self._hints.items() if hint is torch.Tensor)

    @property
    def _layout(self) -> torch.memory_format:
        return torch.contiguous_format if self.contiguous else torch.preserve_format

    def _leading(self, call: C) -> torch.Tensor:
        leading: torch.Tensor = getattr(call, self._first)
        return leading

    def _on_gpu(self, call: C) -> bool:
        return self._leading(call).is_cuda

    def _split(self, call: C) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return call[: self._tensor_count], call[self._tensor_count :]

    def _writes_into(self, call: Any) -> bool:
        return self.into is not None and getattr(call, self.into) is not None

    def check_call(self, call: C) -> None:
        """Raise a ValueError that names the argument for a call that the op has no meaning for."""
        expect = expecting(self.name, self.names)
        tensors = dict(zip(self._hints, call[: self._tensor_count], strict=False))
        optional = [name for name, hint in self._hints.items() if hint == torch.Tensor | None]
        check_tensors(expect, tensors, set(optional) - set(self.required), self.integers, self._first)
        self.check(call, expect)

    def why_not(self, call: C) -> str | None:
        """Why the kernels do not take a call that has a meaning, or None; a call without elements they leave, too."""
        return elsewhere(self._leading(call), self.kernel, self._first) or self.uncovered(call)

    # ---- what tracers see

    @cached_property
    def registered(self) -> Any:
        """The custom op, for CPU and CUDA; its namespace is the module's, so that the ops of a copied task are its own.

        Its arguments are those of `arguments`; the one of `into` has another name there, because Dynamo takes `out` for
        that of PyTorch's own ops and refuses it where it has gaps.
        """
        count = len(self.outputs)
        returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        return self._register(self.name, self.mutates, returns)

    @cached_property
    def registered_into(self) -> Any:
        """The same for calls with `into`: it returns nothing."""
        return self._register(f"{self.name}_{INTO}", (*self.mutates, str(self.into)), "()")

    def _register(self, name: str, mutates: Sequence[str], returns: str) -> Any:
        letters = iter("abcdefgh")
        parts = []
        for argument, hint in self._hints.items():
            kind = TYPES[hint]
            if argument in mutates:
                kind = f"Tensor({next(letters)}!)"
            parts.append(f"{kind} {'target' if argument == self.into else argument}")
        namespace = self.plan.__module__.replace(".", "_")
        qualified = f"{namespace}::{name}"
        torch.library.define(qualified, f"({', '.join(parts)}) -> {returns}")
        torch.library.impl(qualified, ("CPU", "CUDA"), self._impl)
        torch.library.register_fake(qualified, self._fake)
        return getattr(getattr(torch.ops, namespace), name)

    def _registered_for(self, args: tuple[Any, ...]) -> Any:
        if self.into is not None and args[list(self._hints).index(self.into)] is not None:
            return self.registered_into
        return self.registered

    def _impl(self, *args: Any) -> Any:
        return self.run(self.arguments(*args))

    def _fake(self, *args: Any) -> Any:
        """New tensors of the outputs' shapes, dtypes and strides, without data."""
        call = self.arguments(*args)
        if self._writes_into(call):
            return None
        like = [getattr(call, one) if isinstance(one, str) else one(call) for one in self.outputs]
        made = tuple([torch.empty_like(tensor, memory_format=self._layout) for tensor in like])
        return made if len(made) > 1 else made[0] if made else None

    # ---- the public function

    def public(self, function: F) -> F:
        """Decorator: `function`, unchanged, is the op's public function, whose signature `hooks` then knows."""
        signature = inspect.signature(function)

        def to_call(*args: Any, **kwargs: Any) -> C:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            named = {own: bound.arguments.get(self.names.get(own, own), self.fixed.get(own)) for own in self._hints}
            return self.arguments(**named)

        function.kda_op, function.kda_call = self, to_call  # type: ignore[attr-defined]
        return function

    def also(self, to_call: Callable[..., C | str]) -> Callable[[F], F]:
        """Decorator of a function with another signature that ends in this op.

        `to_call` makes the op's call of its arguments, or says why the op is not called.
        """

        def decorate(function: F) -> F:
            function.kda_op, function.kda_call = self, to_call  # type: ignore[attr-defined]
            return function

        return decorate


Launches = Callable[[str, Mapping[str, torch.Tensor], Mapping[str, Any]], list[Any]]
WhyNot = Callable[..., str | None]


def hooks(*functions: Callable[..., Any]) -> tuple[Launches, WhyNot]:
    """What a solution exports beside its public functions: `launches` and `why_not`."""
    public: dict[str, Any] = {function.__name__: function for function in functions}

    def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Any]:
        """What a call of `op` would launch: the hook through which kernels are compiled ahead of time.

        The inputs may be tensors without memory, those that are None left out. Empty where the plain path is taken.
        """
        of: Op[Any] = public[op].kda_op
        names = inspect.signature(public[op]).parameters
        absent = {name: None for name, p in names.items() if p.default is p.empty and name not in (*inputs, *scalars)}
        call = public[op].kda_call(**{**absent, **inputs, **scalars})
        if isinstance(call, str):
            return []
        of.check_call(call)
        if of.uncovered(call) is not None or of._leading(call).numel() == 0:
            return []
        return list(of._chain(of.ready(call)).launches)

    def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
        """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernels; None if not.

        Raises the same ValueError as the call for arguments that the op has no meaning for.
        """
        call = public[op].kda_call(*args, **kwargs)
        if isinstance(call, str):
            return call
        of: Op[Any] = public[op].kda_op
        of.check_call(call)
        return of.why_not(call)

    return launches, why_not


def forget_plans(folder: Path) -> None:
    """Clear the memory of every op of a solution in this folder, for example after changing its tuned table."""
    inside = f"{folder}{os.sep}"
    for op in list(_every):
        if inspect.getfile(op.plan).startswith(inside):
            op.plans.clear()
