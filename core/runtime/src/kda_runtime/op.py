"""`Op`: a public function around its kernels. It plans once per signature of the arguments; later calls are cheap.

A solution supplies five functions of a `Call`, the named tuple of the op's arguments with tensors first:

    check(call, expect)   raises a ValueError, through `expect`, for arguments that the op has no meaning for
    uncovered(call)       why the kernels do not take the call on any device, or None
    plan(call)            the `Launch` or `Chain` of a call that they take; its tensors may be on the meta device
    plain(call)           the same maths in PyTorch, for all other calls; it also writes what the op writes in place
    ready(call)           optional: the call, with copies of the tensors that the kernels cannot read. It returns `call`
                          itself where there is nothing to copy, also where `call` is its own result

A solution may have a second plan and plain path, which round as upstream does and give upstream's bits;
`Op.set_exact` chooses between the two.

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
"""Source of `Op.call`. It names its arguments: packing and unpacking them would cost half as much as its own work."""
INTO = "into"
"""Suffix of the name of the custom op that writes into an argument instead of returning a tensor."""
_every: WeakSet[Op[Any]] = WeakSet()


def _nothing(_call: Any, _expect: Expect) -> None:
    """Default of `check`: all arguments are accepted."""


def _none(_call: Any) -> None:
    """Default of `uncovered`: the kernels take every call."""


def _as_it_is(call: C) -> C:
    return call


@dataclass(frozen=True, eq=False)
class Op(Generic[C]):
    """One public op. The functions are the solution's own, see above."""

    refusal: ClassVar[type[Exception] | None] = None
    """Set on the class, for all ops: what `call` raises, with the op and its call, where the kernels do not take the
    call. None: such a call takes the plain path. A program that has another function for such calls sets it. Compiled
    graphs keep the plain path."""

    name: str
    arguments: type[C]
    _: KW_ONLY
    kernel: object
    """One of the op's Triton kernels. If it is interpreted, the op takes tensors on the CPU. None without any."""
    plan: Callable[[C], Launch | Chain]
    plain: Callable[[C], Any]
    check: Callable[[C, Expect], None] = _nothing
    uncovered: Callable[[C], str | None] = _none
    ready: Callable[[C], C] = _as_it_is
    outputs: Sequence[str | Callable[[C], torch.Tensor]] = ()
    """For each new tensor that is returned, the tensor that it is `torch.empty_like` of: an argument's name, or a
    function of the call that returns such a tensor, for example a view. Empty for in-place ops."""
    contiguous: bool = False
    """The outputs are contiguous, whatever the strides of the tensors that `outputs` names."""
    mutates: Sequence[str] = ()
    """Arguments that are written in place."""
    into: str | None = None
    """An optional argument that the result is written into, where it is given."""
    required: Collection[str] = ()
    """Arguments that may be None in `arguments`, but not in calls of this op."""
    integers: Collection[str] = ()
    """Tensors of integers or bool."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Arguments that have another name in the public function: own name -> public name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that the public function does not have; those not listed here are None."""
    exact: tuple[Callable[[C], Launch | Chain], Callable[[C], Any]] | None = None
    """The plan and the plain path that give upstream's bits: `plan` and `plain` themselves where these do, None where
    nothing does. `set_exact` chooses them."""
    own: tuple[Callable[[C], Launch | Chain], Callable[[C], Any]] = field(init=False, repr=False)
    """`plan` and `plain` as they were given."""
    plans: Plans = field(default_factory=Plans, repr=False)
    """The entries of remembered signatures."""
    call: Callable[..., Any] = field(init=False, repr=False)
    """What the public function does, with the arguments in the order of `arguments`."""

    def __post_init__(self) -> None:
        _every.add(self)
        object.__setattr__(self, "own", (self.plan, self.plain))
        scope = {"is_dynamo_compiling": is_dynamo_compiling, "MISS": MISS, "plans": self.plans, "cold": self._cold}
        exec(CALL.format(names=", ".join(self.arguments._fields)), scope)  # type: ignore[attr-defined]
        object.__setattr__(self, "call", scope["call"])
        self._tensor_count  # noqa: B018  # reports a wrong order of arguments now
        # Register the custom ops now: tracers must find them, and cannot trace a cached property not yet computed.
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
        """The path of a call without a hot entry: the kernels, or the plain path where they do not take the call."""
        result = self.attempt(call)
        if result is not MISS:
            return result
        result = self.plain(call)
        return None if self._writes_into(call) else result

    def attempt(self, call: C, copied: bool = False) -> Any:
        """`run` without the plain path: returns MISS, having written nothing, where the kernels do not take the call.

        `copied`: the call is a result of `ready`.

        Raises:
            TypeError: `ready` does not return its own result unchanged.
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
        """An output as a `Chain` describes it: the index of an argument, or a template without memory."""
        if isinstance(like, str):
            return int(call._fields.index(like))  # type: ignore[attr-defined]
        return torch.empty_like(like(call), device="meta", memory_format=self._layout)

    # ---- the setting

    def set_exact(self, exact: bool = True) -> None:
        """Choose whether all later calls give the bits of upstream's own function. Remembered entries are forgotten.

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
        """Name of the first required tensor: a call runs on its device, and is empty where it is."""
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
        """Why the kernels do not take a valid call, or None. They take no empty call either; this is not checked."""
        return elsewhere(self._leading(call), self.kernel, self._first) or self.uncovered(call)

    # ---- what tracers see

    @cached_property
    def registered(self) -> Any:
        """The custom op, for CPU and CUDA. Its namespace is the solution's module: a copied task has ops of its own.

        Its arguments are those of `arguments`, except that the argument `into` is called `target`: Dynamo takes an
        argument `out` for that of PyTorch's own ops, and refuses it where it has gaps.
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
        """Decorator that makes `function` the op's public function, for `hooks`; calls of it are unchanged."""
        signature = inspect.signature(function)

        def to_call(*args: Any, **kwargs: Any) -> C:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            named = {own: bound.arguments.get(self.names.get(own, own), self.fixed.get(own)) for own in self._hints}
            return self.arguments(**named)

        function.kda_op, function.kda_call = self, to_call  # type: ignore[attr-defined]
        return function

    def also(self, to_call: Callable[..., C | str]) -> Callable[[F], F]:
        """Decorator for a function with another signature that calls this op.

        `to_call` turns the function's arguments into the op's call, or returns the reason why the op is not called.
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

        The inputs may be tensors without memory; those that are None may be left out. Returns an empty list where the
        plain path is taken.
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
