"""Launch a compiled kernel for little more host time than the driver takes, instead of Triton's usual 12 to 18 us.

Pieces, which a solution puts together:

- `Launch` describes one launch: kernel, grid, arguments, options. `Launch.bind()` compiles it and returns a
  function of the pointers alone, the cheapest launch there is.
- `Chain` describes launches in order, and which tensors each of them gets; one launch is a chain of its own.
- `Plans` remembers what the checks and the selection of an earlier call led to, as an **entry**: a function of the
  public arguments that checks their signature, allocates the outputs and launches, all in one call.
- `compile_cute` compiles a CuTe DSL function to a tvm-ffi callable that runs on PyTorch's current stream,
  `cute.cute_cubin` to machine code, which `cubin.CubinLaunch` launches; that takes part in a `Chain` too.

The hot path of a public function is then a loop over a few entries:

    for entry in _PLANS.hot:
        result = entry(x, weight, eps)
        if result is not MISS:
            return result

Both come in two makes. The first is a C object that hands the kernel to the driver (`native`). Where that cannot be
used, or with KDA_LAUNCH=python, it is a generated Python function that calls the C launcher which Triton built for the
kernel (as it is in 3.6 and 3.7) behind Dynamo's tensor guards. All of these are private interfaces, which are looked at
before the first use; where one is missing or has changed, the next takes its place, and the last is Triton's normal
launcher. `how()` says which one it is.
"""

from __future__ import annotations

import functools
import math
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kda_core import native

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

Run = Callable[..., None]
"""Launches a bound kernel: one integer (`tensor.data_ptr()`) per tensor argument, in order."""
Check = Callable[..., bool]
"""True when the arguments have the signature that the check was made for."""
Entry = Callable[..., Any]
"""A bound launch as a function of the public arguments: the outputs (None in place), or MISS for another signature."""

MISS = object()
"""What an entry returns for arguments that it was not made for; nothing was launched then."""

ALIGNMENT = 16
"""Bytes: Triton compiles one variant for pointers divisible by 16 and another for the rest."""
HOT_PLANS = 4
"""Entries tried one after the other before the dictionary; a miss costs about 0.2 us."""
MAX_PLANS = 256
"""Plans remembered per op; the oldest goes first."""


@dataclass(frozen=True)
class Binary:
    """A kernel compiled ahead of time."""

    cubin: bytes
    dynamic_shared_bytes: int
    """Shared memory asked for at launch, which the cubin does not state."""


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel. Holds no tensor, only the dtypes."""

    kernel: JITFunction[Any]
    grid: tuple[int, int, int]
    args: tuple[object, ...]
    """Positional arguments; a `torch.dtype` stands for a tensor of that dtype, 16-byte aligned."""
    constexprs: Mapping[str, object]
    options: Mapping[str, Any]
    """Compiler options such as num_warps."""

    @staticmethod
    def make(kernel: JITFunction[Any], grid: Sequence[int], *args: object, **kwargs: Any) -> Launch:
        """Describe `kernel[grid](*args, **kwargs)`; tensors may live on any device, meta included."""
        x, y, z = (*grid, 1, 1)[:3]
        names = set(kernel.arg_names)
        return Launch(
            kernel=kernel,
            grid=(x, y, z),
            args=tuple(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args),
            constexprs={key: value for key, value in kwargs.items() if key in names},
            options={key: value for key, value in kwargs.items() if key not in names},
        )

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return str(self.kernel.__name__)

    @property
    def variant(self) -> str:
        """What tells this compilation from others of the same kernel: what Triton specialises on, readable."""
        names = [name for name in self.kernel.arg_names if name not in self.constexprs]
        plain = {p.name for p in getattr(self.kernel, "params", ()) if p.do_not_specialize}
        parts = [f"{name}:{_specialised(arg, name in plain)}" for name, arg in zip(names, self.args, strict=False)]
        return " ".join(parts + [f"{key}={value}" for key, value in (*self.constexprs.items(), *self.options.items())])

    def run(self, *tensors: Any) -> None:
        """Launch through Triton's normal launcher (or its interpreter) on the current stream."""
        rest = iter(tensors)
        args = [next(rest) if isinstance(arg, torch.dtype) else arg for arg in self.args]
        options = {} if is_interpreted(self.kernel) else self.options
        self.kernel[self.grid](*args, **self.constexprs, **options)

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors on a GPU."""
        self.run(*map(_Address, [arg for arg in self.args if isinstance(arg, torch.dtype)], addresses))

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one) and return the cheapest way to launch.

        A misaligned pointer, an active launch hook (a profiler), or another current device than the bound one makes a
        call take Triton's normal launcher, which then compiles whatever variant is right.
        """
        index = torch.cuda.current_device() if device is None else device
        slow = _slow(self, index)
        compiled = _compiled(self, index)
        made = _native(self, compiled, slow, index)
        if made is not None:
            return made
        direct = _direct(self, compiled, index)
        if direct is None:
            return slow
        names = ", ".join(direct.pointers)
        lines = [f"def run({names}):", *direct.launch_lines()]
        return _define("run", lines, direct.values | {"slow": slow})

    def entry(
        self,
        arguments: Sequence[object],
        scalars: Sequence[object] = (),
        outputs: Sequence[int] = (),
        device: int | None = None,
    ) -> Entry:
        """Compile and bind for calls like this one: `Chain.entry` of this launch alone.

        The kernel's pointers are the outputs, then the arguments without the Nones, in order.
        """
        tensors = sum(argument is not None for argument in arguments)
        return self.chain(tensors, outputs).entry(arguments, scalars, device)

    def chain(self, tensors: int, outputs: Sequence[int] = ()) -> Chain:
        """This launch alone as a chain, of so many arguments that are tensors: its pointers are the whole table."""
        return Chain((self,), (tuple(range(len(outputs) + tensors)),), tuple(outputs))

    def compile(self, target: str) -> Binary:
        """Compile ahead of time for a target such as `sm_90a`, on any machine, as the JIT would there."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        gpu = GPUTarget("cuda", int("".join(filter(str.isdigit, target))), 32)
        backend = make_backend(gpu)
        bind_arguments = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        kwargs = {"debug": False, **self.constexprs, **self.options}
        args = [_Address(arg, 0) if isinstance(arg, torch.dtype) else arg for arg in self.args]
        bound, specialization, options = bind_arguments(*args, **kwargs)
        options, signature, constexprs, attrs = self.kernel._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        compiled = triton.compile(source, target=gpu, options=options.__dict__)
        return Binary(cubin=compiled.asm["cubin"], dynamic_shared_bytes=compiled.metadata.shared)


class Step(Protocol):
    """A launch as a part of a chain: `Launch`, or what is like it for other kernels."""

    def bind(self, device: int | None = None) -> Run:
        """The cheapest way to launch on a CUDA device, a function of the pointers."""

    def run(self, *tensors: Any) -> None:
        """Launch on the current stream, the straightforward way."""

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors."""


@dataclass(frozen=True)
class Chain:
    """Launches in order on one stream, over one table of tensors: the outputs, then scratch, then the arguments."""

    launches: tuple[Step, ...]
    places: tuple[tuple[int, ...], ...]
    """Per launch and pointer of its kernel: the tensor's place in the table. Arguments that are None have none."""
    outputs: tuple[int | torch.Tensor, ...] = ()
    """Per tensor that is allocated and returned: the index of the argument it is `torch.empty_like`, or a template, a
    tensor (on the meta device, for example) of its shape, layout and dtype."""
    scratch: tuple[torch.Tensor, ...] = ()
    """Templates of what is allocated for the launches alone."""

    def entry(self, arguments: Sequence[object], scalars: Sequence[object] = (), device: int | None = None) -> Entry:
        """Compile and bind for calls like this one.

        Args:
            arguments: the public function's tensors, None where one was left out.
            scalars: what else the plan depends on; passed behind the arguments, compared with `==`.
            device: CUDA device index, by default the current one.
        """
        index = torch.cuda.current_device() if device is None else device
        kinds = [t.device.type for t in (*arguments, *self.outputs) if isinstance(t, torch.Tensor) and not t.is_meta]
        kind = kinds[0] if kinds else "cuda"
        on = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        made = tuple(native.allocation(template, on) for template in self._templates(arguments))
        runs = tuple(launch.bind(index) for launch in self.launches)
        if all(argument is None or _is_plain(argument) for argument in arguments):
            entry = self._native(runs, tuple(arguments), tuple(scalars), made)
            if entry is not None:
                return entry
        return self._python(runs, arguments, scalars, made)

    def run(self, *arguments: torch.Tensor | None) -> Any:
        """Launch through Triton's normal launcher (or its interpreter): the outputs, or None."""
        given = [argument for argument in arguments if argument is not None]
        made = [torch.empty_like(template, device=given[0].device) for template in self._templates(arguments)]
        for launch, places in zip(self.launches, self.places, strict=True):
            launch.run(*((made + given)[place] for place in places))
        return _returned(made[: len(self.outputs)])

    def run_at(self, *addresses: int) -> None:
        """`run` on the current device, into outputs that are there: addresses of these, then of the arguments."""
        made = [torch.empty_like(template, device="cuda") for template in self.scratch]
        outputs, given = addresses[: len(self.outputs)], addresses[len(self.outputs) :]
        table = (*outputs, *(tensor.data_ptr() for tensor in made), *given)
        for launch, places in zip(self.launches, self.places, strict=True):
            launch.run_at(*(table[place] for place in places))

    def _templates(self, arguments: Sequence[object]) -> list[torch.Tensor]:
        like: list[Any] = [arguments[output] if isinstance(output, int) else output for output in self.outputs]
        return [*like, *self.scratch]

    def _native(
        self, runs: Sequence[Run], arguments: tuple[object, ...], scalars: tuple[object, ...], made: tuple[Any, ...]
    ) -> Entry | None:
        """The launches as one C object; None where one of them is not a C object itself."""
        module = native.load(MISS).module
        if module is None or not all(isinstance(run, module.Launch) for run in runs):
            return None
        steps = tuple((run, bytes(places)) for run, places in zip(runs, self.places, strict=True))
        entry: Entry = module.entry(arguments, scalars, made, len(self.outputs), steps)
        return entry

    def _python(
        self, runs: Sequence[Run], arguments: Sequence[object], scalars: Sequence[object], made: Sequence[Any]
    ) -> Entry:
        """The launches as one generated function."""
        tensors = [f"a{i}" for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        missing = [f"a{i} is None" for i, argument in enumerate(arguments) if argument is None]
        values: dict[str, Any] = {"MISS": MISS, "check": guard([a for a in arguments if isinstance(a, torch.Tensor)])}
        same = [_same(f"s{i}", _source(scalar, values, "value")) for i, scalar in enumerate(scalars)]
        conditions = [f"check({', '.join(tensors)})"] * bool(tensors) + missing + same
        parameters = [f"a{i}" for i in range(len(arguments))] + [f"s{i}" for i in range(len(scalars))]
        results = [f"o{i}" for i in range(len(made))]
        pointers = [f"p{i}" for i in range(len(results) + len(tensors))]
        here = torch.cuda.device_count() <= 1
        for i, (function, given, general) in enumerate(made):
            values[f"make{i}"] = functools.partial(function, *given) if function and here else general
        values |= {f"run{i}": run for i, run in enumerate(runs)}
        lines = [
            f"def entry({', '.join(parameters)}):",
            *([f"    if not ({' and '.join(conditions)}):", "        return MISS"] if conditions else []),
            *(f"    {name} = make{i}()" for i, name in enumerate(results)),
            *(f"    {p} = {name}.data_ptr()" for p, name in zip(pointers, [*results, *tensors], strict=True)),
            *(f"    run{i}({', '.join(pointers[p] for p in places)})" for i, places in enumerate(self.places)),
            f"    return {', '.join(results[: len(self.outputs)]) or None}",
        ]
        return _define("entry", lines, values)


def _returned(made: Sequence[torch.Tensor]) -> Any:
    return tuple(made) if len(made) > 1 else made[0] if made else None


def bind(kernel: JITFunction[Any], grid: Sequence[int], *args: object, **kwargs: Any) -> Run:
    """`kernel[grid](*args, **kwargs)` as a function of the tensors' pointers, on the current device.

    The cheapest launch there is: `run = bind(empty, (1,), x, num_warps=1); run(x.data_ptr())`.
    """
    return Launch.make(kernel, grid, *args, **kwargs).bind()


def how() -> str:
    """How bound launches reach the driver here: `native`, or `python` and why."""
    loaded = native.load(MISS)
    return "native" if loaded.module else f"python ({loaded.reason})"


def is_interpreted(kernel: object) -> bool:
    """Whether TRITON_INTERPRET=1 was set when the kernel was defined."""
    return type(kernel).__name__ == "InterpretedFunction"


def is_tracing(*tensors: torch.Tensor) -> bool:
    """Whether a call with these arguments is being recorded, faked or transformed, so that the dispatcher must see it.

    True inside a dispatch mode (FakeTensorMode, make_fx), a functorch transform, or for tensor subclasses with their
    own dispatch. Under Dynamo ask `torch.compiler.is_compiling()` first.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if _get_current_dispatch_mode() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in tensors)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not hold its values: negated and conjugated views, zero tensors.

    PyTorch's own operators resolve these, kernels would read the wrong values.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def _specialised(arg: object, plain: bool) -> str:
    """A runtime argument as Triton's cache key sees it: dtype, or for integers width, divisibility and being 1.

    Of a `plain` integer (`do_not_specialize`), the width alone.
    """
    if isinstance(arg, torch.dtype):
        return str(arg).removeprefix("torch.")
    if not isinstance(arg, int) or isinstance(arg, bool):
        return type(arg).__name__
    if arg == 1 and not plain:
        return "1"
    width = "i32" if -(2**31) <= arg < 2**31 else "i64"
    return f"{width}%16" if arg % ALIGNMENT == 0 and not plain else width


@dataclass(frozen=True)
class _Address:
    """A pointer that Triton's normal launcher accepts where it expects a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _slow(launch: Launch, device: int) -> Run:
    """The normal launcher behind the interface of a bound launch."""

    def run(*addresses: int) -> None:
        with torch.cuda.device(device):
            launch.run_at(*addresses)

    return run


@dataclass(frozen=True)
class _Direct:
    """How to call Triton's C launcher for one launch, as source."""

    pointers: list[str]
    unless: list[str]
    """Conditions under which the normal launcher must be taken."""
    call: str
    values: dict[str, Any]
    """What the source refers to."""

    def launch_lines(self) -> list[str]:
        """Source that launches, given the pointers: indented once, the normal launcher is called `slow`."""
        normal = f"        slow({', '.join(self.pointers)})"
        return [f"    if {' or '.join(self.unless)}:", normal, "    else:", f"        {self.call}"]


def _compiled(launch: Launch, device: int) -> Any:
    """The kernel as compiled and loaded for a device."""
    with torch.cuda.device(device):
        compiled: Any = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constexprs, **launch.options)
        compiled.run  # noqa: B018  loads it
    return compiled


def _is_known(compiled: Any) -> bool:
    """Whether Triton would launch the kernel in the way of the releases that were read, without scratch memory."""
    import triton

    launcher = compiled.run
    return (
        triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])
        and isinstance(getattr(launcher, "launch", None), types.BuiltinFunctionType)
        and not launcher.global_scratch_size
        and not launcher.profile_scratch_size
    )


def _native(launch: Launch, compiled: Any, slow: Run, device: int) -> Run | None:
    """The launch as a C object; None where it cannot be one."""
    from triton import knobs

    module = native.load(MISS).module
    if module is None or not _is_known(compiled):
        return None
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooks = native.Hooks(runtime, enter, leave, getattr(enter, "calls", None), getattr(leave, "calls", None))
    given = dict(zip(launch.kernel.arg_names, _in_order(launch), strict=True))
    unaligned = frozenset(p.name for p in launch.kernel.params if p.do_not_specialize_on_alignment)
    try:
        described = native.describe(compiled, launch.grid, given, unaligned, device, slow, hooks)
        bound: Run | None = None if described is None else module.bind(described)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None  # a parameter that is not what Triton's signature says
    return bound


def _is_plain(argument: object) -> bool:
    """Whether a C entry may be made for a tensor: no subclass, and no gradient would have to be recorded."""
    return type(argument) in (torch.Tensor, torch.nn.Parameter) and not (
        argument.requires_grad and torch.is_grad_enabled()  # type: ignore[attr-defined]
    )


def _direct(launch: Launch, compiled: Any, device: int) -> _Direct | None:
    """The direct call of Triton's C launcher, or None when it is not the launcher known here.

    The two known orders of arguments, read from the driver sources of the releases named:
    3.6: grid, stream, function, cooperative, pdl, scratch x2, packed, metadata, enter, exit, *kernel arguments
    3.7: grid, stream, function, cooperative, pdl, packed, metadata, enter, exit, scratch x2, annotations, signature,
         (kernel arguments)
    An integer in a pointer's place is taken as the address itself, which saves a driver query per pointer.
    """
    import triton
    from triton import knobs

    if not _is_known(compiled):
        return None
    launcher, runtime = compiled.run, knobs.runtime

    values: dict[str, Any] = {}
    given = _in_order(launch)
    arguments = [f"p{i}" if isinstance(value, torch.dtype) else _source(value, values) for i, value in enumerate(given)]
    pointers = [name for name, value in zip(arguments, given, strict=True) if isinstance(value, torch.dtype)]
    # Only where Triton specialises on alignment: each pointer in the test costs 25 ns.
    aligned = [name for name in pointers if not launch.kernel.params[int(name[1:])].do_not_specialize_on_alignment]
    if triton.__version__.startswith("3.6."):
        tail = f"None, None, packed, None, None, None, {', '.join(arguments)}"
    else:
        tail = f"packed, None, None, None, None, None, annotations, signature, ({''.join(f'{a}, ' for a in arguments)})"
        values |= {"annotations": launcher.arg_annotations, "signature": launcher.kernel_signature}
    # Hooks are read on every call (40 ns): profilers add theirs to the chain, or put another object in its place.
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    unless = [f"({' | '.join(aligned)}) & {ALIGNMENT - 1}"] if aligned else []
    unless += ["runtime.launch_enter_hook is not enter", "enter_calls"]
    unless += ["runtime.launch_exit_hook is not leave", "leave_calls"]
    if torch.cuda.device_count() > 1:
        unless.append(f"current_device() != {device}")
    constant = f"function, {launcher.launch_cooperative_grid:d}, {launcher.launch_pdl:d}, {tail}"
    values |= {
        "c_launch": launcher.launch,
        "function": compiled.function,
        "packed": compiled.packed_metadata,
        "runtime": runtime,
        "enter": enter,
        "leave": leave,
        "enter_calls": getattr(enter, "calls", enter),
        "leave_calls": getattr(leave, "calls", leave),
        "stream": torch._C._cuda_getCurrentRawStream,
        "current_device": torch._C._cuda_getDevice,
    }
    # A grid of no blocks launches nothing: it only tries whether the launcher takes these arguments.
    probe = [f"def probe({', '.join(pointers)}):", f"    c_launch(0, 1, 1, 0, {constant})"]
    try:
        _define("probe", probe, values)(*[0] * len(pointers))
    except (TypeError, ValueError, SystemError):
        return None
    grid = ", ".join(map(str, launch.grid))
    return _Direct(pointers, unless, f"c_launch({grid}, stream({device}), {constant})", values)


def _define(name: str, lines: Sequence[str], values: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that the source lines define; `values` are its globals."""
    space = dict(values)
    exec("\n".join(lines), space)
    function: Callable[..., Any] = space[name]
    return function


def _in_order(launch: Launch) -> list[object]:
    """All of the kernel's arguments in the order of its signature, constexprs included."""
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | dict(launch.constexprs)
    parameters = launch.kernel.signature.parameters
    return [given[name] if name in given else parameters[name].default for name in launch.kernel.arg_names]


def _source(value: object, values: dict[str, Any], prefix: str = "c") -> str:
    """An argument that never changes as source: a literal where that is exact, else a global."""
    if value is None or type(value) in (int, bool) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    name = f"{prefix}{len(values)}"
    values[name] = value
    return name


def _same(name: str, value: str) -> str:
    """Source of a comparison; a value that is no literal may be a NaN, which only equals itself by identity."""
    return f"({name} is {value} or {name} == {value})" if value.isidentifier() else f"{name} == {value}"


def guard(arguments: Sequence[object]) -> Check:
    """A check that later arguments have the same signature as these.

    Tensors: type, dtype, device, sizes, strides, whether gradients are recorded, and dispatch keys (so inference mode
    and tracing differ too). Anything else: equal type and value. The check keeps no tensor alive, and costs about
    55 ns per tensor.
    """
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    check = _tensor_guard(tensors)
    names = [f"a{i}" for i in range(len(arguments))]
    values: dict[str, object] = {"check": check}
    terms = []
    for name, argument in zip(names, arguments, strict=True):
        if argument is None:
            terms.append(f"{name} is None")
        elif not isinstance(argument, torch.Tensor):
            values |= {f"v{name}": argument, f"t{name}": type(argument)}
            terms.append(f"type({name}) is t{name} and {name} == v{name}")
    if any(tensor.requires_grad for tensor in tensors):
        values |= {"grad_mode": torch.is_grad_enabled, "recording": torch.is_grad_enabled()}
        terms.append("grad_mode() is recording")
    if not terms:
        return check
    given = [name for name, argument in zip(names, arguments, strict=True) if isinstance(argument, torch.Tensor)]
    terms.append(f"check({', '.join(given)})")
    exec(f"def guarded({', '.join(names)}):\n    return {' and '.join(terms)}\n", values)
    return values["guarded"]  # type: ignore[return-value]


def _tensor_guard(tensors: Sequence[torch.Tensor]) -> Check:
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*tensors) is True:
            return check
    except (ImportError, TypeError, RuntimeError):
        pass
    expected = signature(tensors)
    return lambda *given: signature(given) == expected and not is_tracing(*given)


def signature(arguments: Sequence[object]) -> tuple[object, ...]:
    """What a plan depends on, as a dictionary key: the Python twin of `guard`.

    It tells apart whatever a guard does (inference mode and autocast are in the dispatcher's state), so that an entry
    that was found by it does not miss.
    """
    recording = torch.is_grad_enabled()
    state = (
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
    )
    return state + tuple(
        (type(a), a.dtype, a.device, a.shape, a.stride(), a.requires_grad and recording, _keys(a))
        if isinstance(a, torch.Tensor)
        else (type(a), a)
        for a in arguments
    )


def _keys(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys, as a set of bits."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


class Plans:
    """Bounded memory of entries, per signature of the arguments and value of the scalars.

    `hot` holds the entries made or found last, for the public function to try in turn; `find` looks a signature up
    among all of them and makes its entry hot again.
    """

    def __init__(self, hot: int = HOT_PLANS, total: int = MAX_PLANS) -> None:
        self.hot: tuple[Entry, ...] = ()
        self._hot_limit = hot
        self._total = total
        self._all: dict[tuple[object, ...], Entry] = {}

    def add(self, arguments: Sequence[object], scalars: tuple[object, ...], entry: Entry) -> None:
        """Remember `entry` for arguments like these; the oldest goes when there are too many."""
        self._all.pop(key := (signature(arguments), scalars), None)
        self._all[key] = entry
        while len(self._all) > self._total:
            self._all.pop(next(iter(self._all)))
        self._heat(entry)

    def find(self, arguments: Sequence[object], scalars: tuple[object, ...]) -> Entry | None:
        """The entry for arguments like these, if there is one."""
        entry = self._all.get((signature(arguments), scalars))
        if entry is not None:
            self._heat(entry)
        return entry

    def recall(self, arguments: Sequence[object], scalars: tuple[object, ...]) -> Any:
        """Launch through a remembered entry: its result, or MISS when there is none that takes the call."""
        entry = self.find(arguments, scalars)
        return MISS if entry is None else entry(*arguments, *scalars)

    def launch(
        self,
        launch: Launch | Chain,
        arguments: Sequence[object],
        scalars: tuple[object, ...],
        outputs: Sequence[int] = (),
    ) -> Any:
        """Launch for the first time: on CUDA tensors through a new entry, which is remembered.

        On the CPU (the interpreter), or should the new entry refuse its own call, through Triton's normal launcher.
        Arguments and result are those of `Launch.entry`, or of `Chain.entry`, which says itself what its outputs are.
        """
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        chain = launch if isinstance(launch, Chain) else launch.chain(len(tensors), outputs)
        if tensors[0].is_cuda:
            entry = chain.entry(arguments, scalars, device=tensors[0].device.index)
            self.add(arguments, scalars, entry)
            result = entry(*arguments, *scalars)
            if result is not MISS:
                return result
        return chain.run(*arguments)  # type: ignore[arg-type]  # tensors and Nones

    def clear(self) -> None:
        """Forget everything, for example after changing a solution's tuning table."""
        self._all.clear()
        self.hot = ()

    def _heat(self, entry: Entry) -> None:
        # A new tuple each time: another thread may be walking the old one.
        self.hot = (entry, *(other for other in self.hot if other is not entry))[: self._hot_limit]


def compile_cute(function: Callable[..., Any], *args: Any, options: str = "") -> Callable[..., Any]:
    """Compile a `@cute.jit` function for calls with PyTorch tensors, on PyTorch's current stream.

    `args` are what `cute.compile` takes: fake tensors (`cute.runtime.make_fake_compact_tensor`), constexprs, and
    `environment_stream()` in the stream's place. The result is called with tensors and scalars only, through tvm-ffi:
    4.9 us per call on an H200 host, against 10.7 with a stream object (2026-11-20).
    `options` are passed on, for example `--gpu-arch sm_90a` to compile without a GPU.
    """
    import cutlass.cute as cute

    compiled: Callable[..., Any] = cute.compile(function, *args, options=f"--enable-tvm-ffi {options}".strip())
    return compiled


def environment_stream() -> Any:
    """The stream argument of a `@cute.jit` function that shall run on PyTorch's current stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
