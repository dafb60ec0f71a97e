"""Descriptions of Triton kernel launches: kernel, grid, arguments and options, without tensors.

- `Launch` describes one launch. It runs through Triton's own launcher (or its interpreter), and compiles ahead of time.
- `Chain` describes launches in order, and which tensors each of them gets; one launch is a chain of its own.
- `plans.plain_entry` turns a chain into a function of a call's arguments that uses Triton's own launcher. `bound.entry`
  makes a much cheaper one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

Run = Callable[..., None]
"""Launches a bound kernel: one integer (`tensor.data_ptr()`) per tensor argument, in order."""
Entry = Callable[..., Any]
"""A launch as a function of the public arguments: the outputs (None in place), or MISS for another signature."""

MISS = object()
"""What an entry returns for arguments that it was not made for; nothing was launched then."""

ALIGNMENT = 16
"""Bytes: Triton compiles one variant for pointers divisible by 16 and another for the rest."""


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
    """A named tuple of constants is read in the kernel by its fields' names."""
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
        """Readable text of all that Triton specialises on: it tells apart compilations of the same kernel."""
        names = [name for name in self.kernel.arg_names if name not in self.constexprs]
        plain = {p.name for p in getattr(self.kernel, "params", ()) if p.do_not_specialize}
        parts = [f"{name}:{_specialised(arg, name in plain)}" for name, arg in zip(names, self.args, strict=False)]
        constants = [part for item in (*self.constexprs.items(), *self.options.items()) for part in _named(*item)]
        return " ".join(parts + constants)

    def run(self, *tensors: Any) -> None:
        """Launch through Triton's normal launcher (or its interpreter) on the current stream."""
        rest = iter(tensors)
        args = [next(rest) if isinstance(arg, torch.dtype) else arg for arg in self.args]
        options = {} if is_interpreted(self.kernel) else self.options
        self.kernel[self.grid](*args, **self.constexprs, **options)

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors on a GPU."""
        self.run(*map(Address, [arg for arg in self.args if isinstance(arg, torch.dtype)], addresses))

    def chain(self, tensors: int, outputs: Sequence[int | torch.Tensor] = ()) -> Chain:
        """This launch alone as a chain, for a call with so many tensors: the kernel takes the whole table in order."""
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
        args = [Address(arg, 0) if isinstance(arg, torch.dtype) else arg for arg in self.args]
        bound, specialization, options = bind_arguments(*args, **kwargs)
        options, signature, constexprs, attrs = self.kernel._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        compiled = triton.compile(source, target=gpu, options=options.__dict__)
        return Binary(cubin=compiled.asm["cubin"], dynamic_shared_bytes=compiled.metadata.shared)


class Step(Protocol):
    """One launch of a chain: a `Launch`, or its counterpart for kernels that are not Triton's."""

    def run(self, *tensors: Any) -> None:
        """Launch on the current stream, the straightforward way."""

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors."""


@dataclass(frozen=True)
class Chain:
    """Launches in order on one stream, over one table of tensors: the outputs, then scratch, then the arguments."""

    launches: tuple[Step, ...]
    places: tuple[tuple[int, ...], ...]
    """For each launch and each pointer of its kernel: the tensor's index in the table, which has no None arguments."""
    outputs: tuple[int | torch.Tensor, ...] = ()
    """Per tensor that is allocated and returned: the index of the argument it is `torch.empty_like`, or a template, a
    tensor (on the meta device, for example) of its shape, layout and dtype."""
    scratch: tuple[torch.Tensor, ...] = ()
    """Templates of scratch tensors: they are allocated for each run and not returned."""

    def run(self, *arguments: torch.Tensor | None) -> Any:
        """Launch through Triton's normal launcher (or its interpreter): the outputs, or None."""
        given = [argument for argument in arguments if argument is not None]
        made = [torch.empty_like(template, device=given[0].device) for template in self.templates(arguments)]
        table = made + given
        for launch, places in zip(self.launches, self.places, strict=True):
            launch.run(*[table[place] for place in places])
        outputs = made[: len(self.outputs)]
        return tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None

    def run_at(self, *addresses: int) -> None:
        """`run` on the current device, into existing outputs: takes their addresses, then those of the arguments."""
        made = [torch.empty_like(template, device="cuda") for template in self.scratch]
        outputs, given = addresses[: len(self.outputs)], addresses[len(self.outputs) :]
        table = (*outputs, *(tensor.data_ptr() for tensor in made), *given)
        for launch, places in zip(self.launches, self.places, strict=True):
            launch.run_at(*(table[place] for place in places))

    def templates(self, arguments: Sequence[object]) -> list[torch.Tensor]:
        """For each tensor that a call allocates, a tensor of its shape, layout and dtype."""
        like: list[Any] = [arguments[output] if isinstance(output, int) else output for output in self.outputs]
        return [*like, *self.scratch]


def is_interpreted(kernel: object) -> bool:
    """Whether TRITON_INTERPRET=1 was set when the kernel was defined."""
    return type(kernel).__name__ == "InterpretedFunction"


def is_tracing(*tensors: torch.Tensor) -> bool:
    """Whether a call with these arguments is being recorded, faked or transformed, so that the dispatcher must see it.

    True inside a dispatch mode of a tracer (FakeTensorMode, make_fx's, functionalization's), a functorch transform, or
    for tensor subclasses with their own dispatch. Other modes only observe, and of a Triton launch they see the
    allocations, as always. SGLang's `replay_launches` is one. Under Dynamo ask `torch.compiler.is_compiling()` first.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):
        return True
    return any(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in tensors)


@dataclass(frozen=True)
class Address:
    """A pointer that Triton's normal launcher accepts where it expects a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address itself."""
        return self.address


def _specialised(arg: object, plain: bool) -> str:
    """A runtime argument as Triton's cache key sees it: dtype; for an integer its width, divisibility and being 1.

    Of a `plain` integer (`do_not_specialize`), only the width.
    """
    if isinstance(arg, torch.dtype):
        return str(arg).removeprefix("torch.")
    if not isinstance(arg, int) or isinstance(arg, bool):
        return type(arg).__name__
    if arg == 1 and not plain:
        return "1"
    width = "i32" if -(2**31) <= arg < 2**31 else "i64"
    return f"{width}%16" if arg % ALIGNMENT == 0 and not plain else width


def _named(name: str, value: object) -> list[str]:
    """A constant as `NAME=value`; one for every field of a named tuple, as `NAME.field=value`."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [f"{name}.{field}={part}" for field, part in zip(value._fields, value, strict=True)]
    return [f"{name}={value}"]
