"""Launches of kernels that were compiled elsewhere, such as CuTe DSL's: the counterpart of `launch.Launch`.

A `CubinLaunch` is bound to the same C object as a Triton kernel, and so can be part of a `launch.Chain`. Calls that
this object does not handle (a misaligned address, another current device, a thread without a context), and all calls
where the C half cannot be used, reach the driver from Python, through ctypes. No private interface is used.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from kda_runtime.launch import ALIGNMENT, MISS, Run

NON_PORTABLE_CLUSTER, MOST_SHARED_BYTES = 14, 8
"""CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PORTABLE_BLOCKS, USUAL_SHARED_BYTES = 8, 48 * 1024
"""Blocks of a cluster, and bytes of shared memory of a block, above which a function needs an attribute set first."""
CLUSTER, DEPENDENT = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
NO_HOOKS: tuple[object, ...] = (None, None, None, [], [])
"""Passed in place of Triton's launch hooks, which are only for Triton's kernels."""


class Address(Enum):
    """A parameter that is a pointer: each call gives it."""

    ALIGNED = "divisible by 16"
    ANY = "any"


class Bindable:
    """A launch that `run` and `run_at` bind at the first call on a device only: that takes longer than a launch.

    What is bound must not refer to this object, or the C launcher's objects, which know no cycles, would never go.
    """

    def bind(self, device: int | None = None) -> Run:
        """Load it on a CUDA device (default: the current one): a function of the addresses."""
        raise NotImplementedError

    def run(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of their device."""
        self._on(tensors[0].device.index)(*[tensor.data_ptr() for tensor in tensors])

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors on the current device."""
        self._on(torch.cuda.current_device())(*addresses)

    @functools.cached_property
    def _bound(self) -> dict[int, Run]:
        return {}

    def _on(self, device: int) -> Run:
        run = self._bound.get(device)
        if run is None:
            run = self._bound[device] = self.bind(device)
        return run


@dataclass(frozen=True)
class CubinLaunch(Bindable):
    """One launch of the only kernel in a cubin, of blocks in one dimension."""

    name: str
    cubin: bytes = field(repr=False)
    grid: tuple[int, int, int]
    """In blocks, also where there are clusters."""
    threads: int
    params: tuple[Address | bytes, ...]
    """The kernel's parameters in order; a number is given as its 1 to 8 bytes."""
    cluster: int = 1
    """Blocks of a cluster, in the grid's first dimension."""
    dynamic_shared_bytes: int = 0
    dependent: bool = False
    """Programmatic dependent launch."""
    otherwise: Run | None = None
    """Called with the addresses instead, on the kernel's device, if one of them is not aligned as `params` says. It
    gets all calls if the device has no room for a cluster; a slice of a GPU may have none for more than 8 blocks."""

    def bind(self, device: int | None = None) -> Run:
        """Load it on a CUDA device (default: the current one) and return the cheapest way to launch."""
        index = torch.cuda.current_device() if device is None else device
        function = _loaded(self.cubin, index, self.cluster, self.dynamic_shared_bytes)
        self._check_params(function)
        if self.otherwise is not None and not self._has_room(function, index):
            return functools.partial(_leave, self.otherwise, index)
        slow = self._slow(function, index)
        try:
            from kda_runtime import native
        except ImportError:  # a plain export leaves the C launcher out
            return slow
        module = native.load(MISS).module
        if module is None:
            return slow
        bound: Run = module.bind((*self._described(function, index, slow), native.current_device()))
        return bound

    def _described(self, function: int, device: int, slow: Run) -> tuple[object, ...]:
        """The launch as `native.c` takes it, without the function that gives the current device."""
        places = self._places
        return (
            self.name,
            function,
            self.grid,
            self.threads,
            self.cluster,
            self.dynamic_shared_bytes,
            self.dependent,
            False,
            device,
            self._template,
            bytes(map(_size, self.params)),
            bytes(places),
            bytes(self.params[place] is Address.ALIGNED for place in places),
            slow,
            *NO_HOOKS,
        )

    @property
    def _places(self) -> list[int]:
        """Which parameters are pointers."""
        return [i for i, param in enumerate(self.params) if isinstance(param, Address)]

    @property
    def _template(self) -> bytes:
        """The parameters, 8 bytes each, with zeros for the pointers."""
        return b"".join((b"" if isinstance(p, Address) else p).ljust(8, b"\0") for p in self.params)

    def _check_params(self, function: int) -> None:
        """Raise ValueError unless the kernel's parameters have the sizes of `params`."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found: list[int] = []
        get, kernel = _driver().cuFuncGetParamInfo, ctypes.c_void_p(function)
        while not get(kernel, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
            found.append(size.value)
        expected = list(map(_size, self.params))
        if found != expected:
            raise ValueError(f"kernel {self.name}: expected parameters of {expected} bytes, its cubin has {found}")

    def _slow(self, function: int, device: int) -> Run:
        """A launch from Python, on the current stream of a device.

        What does not depend on the call is made here. A call only copies it: two threads may launch at once.
        """
        words, pointers = ctypes.c_uint64 * len(self.params), ctypes.c_void_p * len(self.params)
        kernel, shared, template = ctypes.c_void_p(function), self._config(device), self._template
        places = [(place, ALIGNMENT - 1 if self.params[place] is Address.ALIGNED else 0) for place in self._places]
        name, otherwise, is_empty = self.name, self.otherwise, 0 in self.grid

        def reach_driver(values: ctypes.Array[ctypes.c_uint64]) -> None:
            _make_context(device)
            config, start = _Config.from_buffer_copy(shared), ctypes.addressof(values)
            config.stream = torch._C._cuda_getCurrentRawStream(device)
            params = pointers(*range(start, start + ctypes.sizeof(values), 8))
            _call("cuLaunchKernelEx", ctypes.byref(config), kernel, params, None)

        def launch(*addresses: int) -> None:
            values = words.from_buffer_copy(template)
            for (place, low_bits), address in zip(places, addresses, strict=True):
                if address & low_bits:
                    if otherwise is None:
                        raise ValueError(f"kernel {name}: expected an address divisible by 16, got {address:#x}")
                    return _leave(otherwise, device, *addresses)
                values[place] = address
            if is_empty:
                return None  # the driver calls an empty grid an error
            if torch.cuda.current_device() == device:
                return reach_driver(values)
            with torch.cuda.device(device):
                return reach_driver(values)

        return launch

    def _has_room(self, function: int, device: int) -> bool:
        """Whether the device can hold a cluster of this launch. Every device with clusters can hold up to 8 blocks."""
        if self.cluster <= PORTABLE_BLOCKS:
            return True
        config, count = self._config(device), ctypes.c_int()
        with torch.cuda.device(device), beside_capture():
            _call("cuOccupancyMaxActiveClusters", ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config))
        return count.value > 0

    def _config(self, device: int) -> _Config:
        attributes = (_Attribute * 2)()
        used = [(DEPENDENT, (1,))] * self.dependent + [(CLUSTER, (self.cluster, 1, 1))] * (self.cluster > 1)
        for attribute, (number, words) in zip(attributes, used, strict=False):
            attribute.number, attribute.value[: len(words)] = number, words
        made = _Config(
            size=(*self.grid, self.threads, 1, 1),
            shared=self.dynamic_shared_bytes,
            stream=torch._C._cuda_getCurrentRawStream(device),
            attributes=ctypes.addressof(attributes),
            count=len(used),
        )
        made.held = attributes  # keeps them alive: the structure has only their address
        return made


def _leave(otherwise: Run, device: int, *addresses: int) -> None:
    """Have `otherwise` do the work."""
    with torch.cuda.device(device):
        otherwise(*addresses)


def _size(param: Address | bytes) -> int:
    return 8 if isinstance(param, Address) else len(param)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("number", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("size", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )
    held: object


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; RuntimeError where it fails."""
    if code := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: CUDA error {code}: {(text.value or b'unknown').decode()}")


@contextmanager
def beside_capture() -> Iterator[None]:
    """Allow what the capture of a CUDA graph forbids its thread, such as loading a kernel; the graph has none of it."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _make_context(device: int) -> None:
    """Give a thread that has no context PyTorch's, which is the device's primary one."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


def kernel_name(cubin: bytes) -> bytes:
    """The name of a cubin's only kernel: in ELF each has a section."""
    names: list[bytes] = sorted(set(re.findall(rb"\0\.text\.([\w$]+)(?=\0)", cubin)))
    if len(names) != 1:
        raise ValueError(f"expected a cubin with one kernel, got {[name.decode() for name in names]}")
    return names[0]


@functools.cache
def _loaded(cubin: bytes, device: int, cluster: int, shared_bytes: int) -> int:
    """Handle of a cubin's only kernel on the device, with the attributes set that it needs. It stays loaded."""
    module, function, name = ctypes.c_void_p(), ctypes.c_void_p(), kernel_name(cubin)
    with torch.cuda.device(device), beside_capture():
        _make_context(device)
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name)
        if cluster > PORTABLE_BLOCKS:
            _call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
        if shared_bytes > USUAL_SHARED_BYTES:
            _call("cuFuncSetAttribute", function, MOST_SHARED_BYTES, shared_bytes)
    assert function.value is not None
    return function.value
