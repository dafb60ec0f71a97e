"""What solutions ask about the arguments of a call: whether it has a meaning, and whether a kernel takes it.

    CHECKS    `check_tensors`, `expecting`: ValueErrors for arguments that an op has no meaning for
    REASONS   `elsewhere`, `unfit`, `scattered`: why a call takes the plain PyTorch path, or None
    PLANS     `capability`, `pdl_works`, `output_strides`: what a launch depends on besides its arguments

Nothing here runs on a call whose plan is known: `op.Op` tries its hot entries first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from kda_runtime.launch import is_interpreted
from kda_runtime.tuned_table import DEFAULT_CAPABILITY

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that kernels take, computing in float32."""
PDL_CAPABILITY = 9
"""Major number of the compute capability from which on programmatic dependent launch exists."""

Expect = Callable[[bool, str, str, object], None]
"""`expect(fits, argument, expected, got)` raises a ValueError that names the argument where it does not fit."""


def expecting(op: str, names: Mapping[str, str] | None = None) -> Expect:
    """The `Expect` of an op; `names` are the public names of arguments that a solution calls otherwise."""

    def expect(fits: bool, argument: str, expected: str, got: object) -> None:
        if not fits:
            raise ValueError(f"{op}: {(names or {}).get(argument, argument)}: expected {expected}, got {got}")

    return expect


def given(call: Any) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call (a named tuple) by name, in order."""
    named = zip(call._fields, call, strict=True)
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


# --- what is wrong with a call


def check_tensors(
    expect: Expect,
    arguments: Mapping[str, object],
    optional: Collection[str] = (),
    integers: Collection[str] = (),
    like: str = "x",
) -> None:
    """Raise ValueError unless all arguments are floating-point tensors on one device, that of the argument `like`.

    Arguments in `optional` may be None; those in `integers` must have an integer dtype or bool.
    """
    for name, value in arguments.items():
        absent = value is None and name in optional
        expect(absent or isinstance(value, torch.Tensor), name, "a tensor", value)
    device = arguments[like].device  # type: ignore[attr-defined]
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        expect(value.device == device, name, f"device {device}, as {like}", value.device)
        if name in integers:
            expect(not (value.is_floating_point() or value.is_complex()), name, "an integer dtype or bool", value.dtype)
        else:
            expect(value.is_floating_point(), name, "a floating-point dtype", value.dtype)


# --- why a kernel does not take a call


def elsewhere(x: torch.Tensor, kernel: object, name: str = "x") -> str | None:
    """Why the kernel does not run on x's device, or None; `kernel` is None where Triton cannot interpret it."""
    device = x.device.type
    if device == "cuda" or (device == "cpu" and is_interpreted(kernel)):
        return None
    interpreted = "" if kernel is None else ", and on the CPU when TRITON_INTERPRET=1"
    return f"{name} is on {device}; the kernel runs on CUDA devices{interpreted}"


def unfit(tensors: Mapping[str, torch.Tensor], dtypes: Collection[torch.dtype] = FLOATS) -> str | None:
    """Why no kernel can read one of these tensors on any device, or None. An integer dtype is no reason."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in dtypes:
            *most, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            return f"{name} has dtype {tensor.dtype}; the kernel takes {', '.join(most)} and {last}"
        if is_lazy(tensor):
            return f"{name} is a negated or conjugated view or a zero tensor: its memory does not hold its values"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{name} requires gradients, which are being recorded; the kernel has no backward pass"
    return None


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not hold its values: negated and conjugated views, zero tensors.

    PyTorch's own operators resolve these, kernels would read the wrong values.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def scattered(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why vectors of one of these tensors cannot be loaded along its last dimension, or None."""
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} has stride {tensor.stride(-1)} in its last dimension; the kernel takes vectors along it"
    return None


# --- what a launch depends on


def capability(x: torch.Tensor) -> int:
    """Major number of the compute capability of x's device; for tensors elsewhere `DEFAULT_CAPABILITY`."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else DEFAULT_CAPABILITY


def pdl_works(kernel: object, major: int) -> bool:
    """Whether a kernel's grid can be set up while the one before it drains (programmatic dependent launch)."""
    return major >= PDL_CAPABILITY and not is_interpreted(kernel)


def output_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of `torch.empty_like(x)`: x's own where x has no gaps or overlaps, else dense in x's order."""
    return torch.empty_like(x, device="meta").stride()
