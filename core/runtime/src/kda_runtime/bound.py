"""The fast way to launch: a compiled kernel, bound to its launch, as a C object.

`entry` turns a `Chain` into a function of a call's arguments. In one C function (`native.c`) it compares them with
those it was made for, allocates the outputs and hands the kernels to the driver. Where that cannot be used, kernels go
through Triton's own launcher: with KDA_LAUNCH=triton, on a release of PyTorch or Triton whose private interfaces are
not known here, and for kernels that the C half does not cover. `how()` says which launcher is used, and why; one
warning says so too, unless KDA_LAUNCH asked for it.
"""

from __future__ import annotations

import functools
import struct
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from kda_runtime import native
from kda_runtime.cubin import beside_capture
from kda_runtime.launch import MISS, Chain, Entry, Launch, Run, Step
from kda_runtime.plans import plain_entry

KNOWN = (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])
"""Releases of Triton (major, minor) whose launcher was read."""


def entry(chain: Chain, arguments: Sequence[object], scalars: tuple[object, ...]) -> Entry:
    """Compile, bind and return the entry for calls like this one, on the device of its tensors.

    Args:
        chain: what is launched.
        arguments: the op's tensors, None where one was left out.
        scalars: the other arguments, on which the plan depends too; passed after the tensors, compared with `==`.
    """
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    loaded = native.load(MISS)
    module = loaded.module
    if module is None:
        _say(loaded.reason)
    if module is None or not all(argument is None or _is_plain(argument) for argument in arguments):
        return plain_entry(chain, arguments, scalars)
    runs = tuple(bind(step, device.index) for step in chain.launches)
    if not all(isinstance(run, module.Launch) for run in runs):
        return plain_entry(chain, arguments, scalars)
    steps = tuple((run, bytes(places)) for run, places in zip(runs, chain.places, strict=True))
    made = tuple(native.allocation(template, device) for template in chain.templates(arguments))
    bound: Entry = module.entry(tuple(arguments), scalars, made, len(chain.outputs), steps)
    return bound


def bind(step: Step, device: int | None = None) -> Run:
    """Compile for a CUDA device (default: the current one) and return the cheapest way to launch.

    A misaligned pointer, an active launch hook (a profiler), or another current device than the bound one makes a
    call take Triton's normal launcher, which then compiles whatever variant is right.
    """
    index = torch.cuda.current_device() if device is None else device
    if not isinstance(step, Launch):
        run: Run = step.bind(index)  # type: ignore[attr-defined]  # a kernel that was compiled elsewhere
        return run
    compiled = _compiled(step, index)
    slow = _slow(step, index, compiled)
    return _native(step, compiled, slow, index) or slow


def how() -> str:
    """How bound launches of Triton's kernels reach the driver here: `native`, or `triton` and why."""
    reason = _reason()
    return f"triton ({reason})" if reason else "native"


def _reason() -> str:
    """Why Triton's kernels cannot be C objects here; empty where they can."""
    import triton

    known = triton.__version__.split(".")[:2] in KNOWN
    return native.load(MISS).reason or ("" if known else f"triton {triton.__version__} is not known here")


@functools.cache
def _say(reason: str) -> None:
    if not reason.startswith(native.VARIABLE):
        text = f"kernels are launched by Triton's own launcher, which costs the host more: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _slow(launch: Launch, device: int, compiled: Any) -> Run:
    """Triton's normal launcher with the interface of a bound launch. It holds a reference to `compiled`.

    From Triton 3.8 on a kernel is unloaded from the GPU when its last reference goes.
    """

    def run(*addresses: int, _held: Any = compiled) -> None:
        with torch.cuda.device(device):
            launch.run_at(*addresses)

    return run


def _compiled(launch: Launch, device: int) -> Any:
    """The kernel as compiled and loaded for a device."""
    with torch.cuda.device(device), beside_capture():
        compiled: Any = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constexprs, **launch.options)
        compiled.run  # noqa: B018  loads it
    return compiled


def _native(launch: Launch, compiled: Any, slow: Run, device: int) -> Run | None:
    """The launch as a C object; None where it cannot be one."""
    if reason := _reason():
        _say(reason)
        return None
    try:
        described = _described(launch, compiled, slow, device)
        bound: Run | None = None if described is None else native.load(MISS).module.bind(described)
    except (*native.FAILURES, LookupError, OverflowError, struct.error) as error:
        # A parameter differs from Triton's signature, or a private interface from the one that was read.
        _say(f"kernel {launch.name}: {type(error).__name__}: {error}")
        return None
    return bound


def _described(launch: Launch, compiled: Any, slow: Run, device: int) -> tuple[object, ...] | None:
    """What `native.c` takes; None for a kernel that it does not cover, such as one with scratch memory."""
    from triton import knobs

    launcher, runtime = compiled.run, knobs.runtime
    plain = isinstance(launcher.launch, types.BuiltinFunctionType)
    if not plain or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooks = native.Hooks(runtime, enter, leave, getattr(enter, "calls", None), getattr(leave, "calls", None))
    given = dict(zip(launch.kernel.arg_names, _in_order(launch), strict=True))
    unaligned = frozenset(p.name for p in launch.kernel.params if p.do_not_specialize_on_alignment)
    return native.describe(compiled, launch.grid, given, unaligned, device, slow, hooks)


def _is_plain(argument: object) -> bool:
    """Whether a C entry may be made for a tensor: no subclass, and no gradient would have to be recorded."""
    return type(argument) in (torch.Tensor, torch.nn.Parameter) and not (
        argument.requires_grad and torch.is_grad_enabled()  # type: ignore[attr-defined]
    )


def _in_order(launch: Launch) -> list[object]:
    """All of the kernel's arguments in the order of its signature, constexprs included."""
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | dict(launch.constexprs)
    parameters = launch.kernel.signature.parameters
    return [given[name] if name in given else parameters[name].default for name in launch.kernel.arg_names]
