"""The C half of `bound`: built once per machine, checked once per process, used where all checks pass.

`native.c` compares a call's arguments with those that a launch was made for and hands the kernel to the driver, in one
C function. It relies on four things, each of which is checked before the first use:

- DLPack's C exchange interface of torch.Tensor (2.10 and later): address, sizes, strides and the current stream;
- a tensor's dispatch keys, at offsets found by comparing memory with what PyTorch reports for sample tensors;
- two symbols of libc10 (the thread's dispatch keys, the gradient mode), tried in states that must differ;
- the driver's list of a kernel's parameters, compared with the one that is going to be passed.

It is compiled with the C compiler that Triton needs for its own launcher, into Triton's cache, under a name derived
from its content; several processes may do so at once. KDA_LAUNCH=triton turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VARIABLE = "KDA_LAUNCH"
"""Environment variable: `native` (the default) or `triton`."""
WORD = 8
"""Bytes of a pointer, and of a set of dispatch keys."""
IMPL_WORDS = 24
"""Words of a TensorImpl that are searched: 192 bytes, less than its size in any release that has this interface."""
SCRATCH = 2
"""Number of pointers that Triton adds after a kernel's own parameters: global and profile scratch, null if unused."""
MOST_SHARED_BYTES = 228 * 1024
"""Bytes of shared memory above which Triton 3.8 and later launch with one more attribute."""
FORMATS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
"""Triton's scalar types as `struct` formats. Half floats never come from a Python argument."""


FAILURES = (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError, subprocess.SubprocessError)
"""Exceptions raised where a compiler, header or driver is missing, or PyTorch or Triton is another release."""


@dataclass(frozen=True)
class Native:
    """The C half, or why there is none."""

    module: Any
    reason: str


@dataclass(frozen=True)
class Hooks:
    """Triton's launch hooks as they were when a launch was bound; profilers change them."""

    runtime: Any
    enter: Any
    leave: Any
    enter_calls: Any
    leave_calls: Any


@functools.cache
def load(miss: object) -> Native:
    """The compiled and checked module; the first call builds it, which takes about 1 s on a new machine.

    `miss` is what its entries shall return for arguments that they were not made for.
    """
    if (wish := os.environ.get(VARIABLE, "native")) != "native":
        return Native(None, f"{VARIABLE}={wish}")
    try:
        module = _build()
        impl, keys = _offsets()
        module.setup(torch.Tensor.__dlpack_c_exchange_api__, impl, keys, miss)
        _try_state(module)
    except FAILURES as error:
        return Native(None, f"{type(error).__name__}: {error}")
    return Native(module, "")


def _build() -> Any:
    from triton.runtime.build import compile_module_from_src

    torch_libraries = Path(torch.__file__).parent / "lib"
    spec = find_spec("triton")
    headers = Path(*(spec.submodule_search_locations or ()) if spec else ()) / "backends" / "nvidia" / "include"
    for needed in (torch_libraries / "libc10.so", headers / "cuda.h"):
        if not needed.is_file():
            raise RuntimeError(f"no {needed}")
    # libc10 is loaded already, so the name alone finds it again: no path of this machine is in the module.
    return compile_module_from_src(
        Path(__file__).with_suffix(".c").read_text(encoding="utf-8"),
        "kda_native",
        library_dirs=[str(torch_libraries)],
        include_dirs=[str(headers)],
        libraries=["libc10.so"],
    )


def _offsets() -> tuple[int, int]:
    """Byte offsets of the TensorImpl's address in a tensor object, and of the dispatch keys in the TensorImpl."""
    with torch.inference_mode():
        inference = torch.zeros(2)
    x = torch.zeros(2)
    samples = [x, inference, torch._neg_view(x), x.to("meta"), torch.nn.Parameter(x), x.to(torch.complex64).conj()]
    impl = [tensor._cdata for tensor in samples]
    keys = [torch._C._dispatch_keys(tensor).raw_repr() for tensor in samples]
    return (
        _search([id(tensor) for tensor in samples], impl, range(2, torch.Tensor.__basicsize__ // WORD)),
        _search(impl, keys, range(IMPL_WORDS)),
    )


def _search(bases: Sequence[int], expected: Sequence[int], words: range) -> int:
    found = [
        word * WORD
        for word in words
        if [ctypes.c_uint64.from_address(base + word * WORD).value for base in bases] == list(expected)
    ]
    if len(found) != 1:
        raise RuntimeError(f"tensors of torch {torch.__version__} are laid out in an unknown way")
    return found[0]


def _try_state(module: Any) -> None:
    """Raise RuntimeError unless the module sees each change of the dispatcher's state exactly as PyTorch does."""

    def seen() -> tuple[int, int]:
        # Stored XORed with constants, which cancel out below.
        included, excluded, _ = module.state()
        return (
            included ^ torch._C._dispatch_tls_local_include_set().raw_repr(),
            excluded ^ torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        )

    expected, before = seen(), module.state()[:2]
    with torch.inference_mode():
        fits = seen() == expected and module.state()[:2] != before
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            fits = fits and module.state()[2] is enabled
    if not fits or module.state()[:2] != before:
        raise RuntimeError(f"torch {torch.__version__} keeps the dispatcher's state in an unknown way")


def describe(
    compiled: Any,
    grid: tuple[int, int, int],
    given: Mapping[str, object],
    unaligned: frozenset[str],
    device: int,
    slow: Callable[..., None],
    hooks: Hooks,
) -> tuple[object, ...] | None:
    """A compiled kernel's launch as `native.c` takes it, or None when it needs something that is not covered there.

    Args:
        compiled: Triton's compiled kernel.
        grid: number of programs.
        given: the kernel's arguments by name; a dtype stands for a pointer.
        unaligned: names of pointers whose alignment Triton did not specialise on.
        device: CUDA device index.
        slow: the normal launcher, a function of the pointers.
        hooks: Triton's launch hooks.
    """
    warps, clusters, shared = compiled.packed_metadata
    launcher = compiled.run
    if clusters != 1 or shared > MOST_SHARED_BYTES:
        return None
    if not (type(hooks.enter_calls) is list and type(hooks.leave_calls) is list):
        return None
    values: list[bytes] = []
    sizes: list[int] = []
    pointers: list[int] = []
    aligned: list[bool] = []
    for name, kind in compiled.src.signature.items():
        if kind == "constexpr":
            continue
        if kind.startswith("*") and isinstance(given[name], torch.dtype):
            pointers.append(len(values))
            aligned.append(name not in unaligned)
            packed = bytes(WORD)
        elif kind in FORMATS:
            packed = struct.pack(f"<{FORMATS[kind]}", given[name])
        else:
            return None
        values.append(packed.ljust(WORD, b"\0"))
        sizes.append(len(packed))
    values += [bytes(WORD)] * SCRATCH
    sizes += [WORD] * SCRATCH
    return (
        compiled.src.fn.__name__,
        compiled.function,
        grid,
        warps * 32,
        clusters,
        shared,
        launcher.launch_pdl,
        launcher.launch_cooperative_grid,
        device,
        b"".join(values),
        bytes(sizes),
        bytes(pointers),
        bytes(aligned),
        slow,
        hooks.runtime,
        hooks.enter,
        hooks.leave,
        hooks.enter_calls,
        hooks.leave_calls,
        current_device(),
    )


def current_device() -> Callable[[], int] | None:
    """The function by which a launch asks for the current device; None where there is at most one device."""
    return None if torch.cuda.device_count() <= 1 else torch._C._cuda_getDevice


def allocation(template: torch.Tensor, device: torch.device) -> tuple[Any, tuple[object, ...], Callable[[], Any]]:
    """`torch.empty_like(template, device=device)` twice: a fast function with its arguments, and a general one without.

    The first bypasses the argument parser and the dispatcher, and allocates on the current device: 0.36 us against
    0.65 on the CPU. It is None where PyTorch has no such function. The template's memory is not kept.
    """
    like = torch.empty_like(template, device="meta")
    shape, stride, dtype = tuple(like.shape), like.stride(), like.dtype
    general = functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
    try:
        from torch._C._dynamo import guards

        function = getattr(guards, f"_empty_strided_{device.type}")
        tried = function((2, 1), (1, 2), dtype)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None, (), general
    fits = tried.stride() == (1, 2) and tried.dtype == dtype and tried.device.type == device.type
    return (function if fits else None), (shape, stride, dtype), general
