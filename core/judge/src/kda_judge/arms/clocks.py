"""The worker's clocks. Imported before the arm, so that names an arm patches later are not the ones used here."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

Call = Callable[..., Any]
Arguments = tuple[Any, ...]

_clock = perf_counter_ns
_cuda_synchronize = torch.cuda.synchronize
_Event: Any = torch.cuda.Event
_sum, _zeros = torch.sum, torch.zeros
_library = ctypes.CDLL
_no_modes: Any = (torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch)


def _at_hand() -> None:
    _cuda_synchronize()
    _Event().record()
    _cuda_synchronize()


class Clock:
    """Times an op on one device. Totals are microseconds over all calls."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the device is idle; nothing to wait for on a CPU."""
        if self._cuda:
            _cuda_synchronize()

    def ready(self) -> None:
        """Have the GPU switch to this process: after the judge's has used it, that takes up to a millisecond."""
        if self._cuda:
            _at_hand()

    def wall(self, op: Call, calls: Sequence[Arguments], scalars: dict[str, Any]) -> tuple[float, float | None, Any]:
        """Back-to-back calls ending in a synchronise: host microseconds, event microseconds, the last result.

        The two event records cost about 2 us a sample, the same for every arm.
        """
        gc.disable()
        try:
            begin, end = (_Event(enable_timing=True), _Event(enable_timing=True)) if self._cuda else (None, None)
            self.ready()
            start = _clock()
            if begin is not None:
                begin.record()
            for arguments in calls:
                out = op(*arguments, **scalars)
            if end is not None:
                end.record()
            self.synchronize()
            total = (_clock() - start) / 1e3
        finally:
            gc.enable()
        events = begin.elapsed_time(end) * 1e3 if begin is not None else None
        return total, events, out

    def latency(self, op: Call, calls: Sequence[Arguments], scalars: dict[str, Any]) -> float:
        """Each call followed by a synchronise: host microseconds over all of them."""
        gc.disable()
        try:
            self.ready()
            start = _clock()
            for arguments in calls:
                op(*arguments, **scalars)
                self.synchronize()
            return (_clock() - start) / 1e3
        finally:
            gc.enable()


@contextmanager
def aside() -> Iterator[None]:
    """Launch on a stream beside the current one, and wait for it at the end: how first calls run before a capture.

    All first calls of a process share that stream. On H100s, most kernels without dependent launch took longer in all
    CUDA graphs of a process once it had launched on a dozen streams.
    """
    current, side = torch.cuda.current_stream(), _side(torch.cuda.current_device())
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@cache
def _side(device: int) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Change(NamedTuple):
    """What a graph does around one of its calls."""

    at: int
    """The call's number."""
    before: Callable[[], None]
    after: Callable[[], None]


@contextmanager
def capturing(graph: Any) -> Iterator[None]:
    """Capture into a `torch.cuda.CUDAGraph`; a capture that fails leaves torch as it was.

    After a failed capture, torch's own context (2.11) leaves the capturing stream current, and its allocator recording:
    from then on an `empty_cache` raises an error, and the end of a memory pool ends the process.
    """
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        with suppress(RuntimeError):  # the allocator records no more: the capture reached its end
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


class Graph:
    """A CUDA graph of the calls. A replay takes the GPU's time without the host's."""

    def __init__(
        self, op: Call, calls: Sequence[Arguments], scalars: dict[str, Any], change: Change | None = None
    ) -> None:
        with aside():
            op(*calls[0], **scalars)
        self.calls = len(calls)
        # A graph knows addresses alone: what `op` and `calls` hold has to live as long as it is replayed.
        self._held = op, calls
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            for number, arguments in enumerate(calls):
                if change is not None and number == change.at:
                    change.before()
                self.out = op(*arguments, **scalars)
                if change is not None and number == change.at:
                    self.changed = self.out  # held: no later call of the graph gets its memory
                    change.after()
        _cuda_synchronize()

    def replay(self, times: int) -> tuple[float, float]:
        """Replay: host and event microseconds over all calls of all replays."""
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        _at_hand()
        start = _clock()
        begin.record()
        for _ in range(times):
            self._graph.replay()
        end.record()
        _cuda_synchronize()
        return (_clock() - start) / 1e3, begin.elapsed_time(end) * 1e3

    def replay_flushed(self, times: int, flush: int) -> tuple[float, float]:
        """As `replay`, but `flush` bytes are read before every replay, outside its events.

        The read leaves none of the op's data in the caches, not even lines that an arm asked the L2 to keep.
        """
        pairs = [(_Event(enable_timing=True), _Event(enable_timing=True)) for _ in range(times)]
        with ExitStack() as unpatched:
            for no_mode in _no_modes:  # a mode that the arm left on would see the read
                unpatched.enter_context(no_mode())
            memory = _zeros(flush // 4, dtype=torch.int32, device="cuda")
            forget = _library("libcuda.so.1").cuCtxResetPersistingL2Cache
            _at_hand()
            start = _clock()
            for begin, end in pairs:
                forget()
                _sum(memory)
                begin.record()
                self._graph.replay()
                end.record()
            _cuda_synchronize()
            return (_clock() - start) / 1e3, sum(begin.elapsed_time(end) for begin, end in pairs) * 1e3


def count_kernels(op: Call, calls: Sequence[Arguments], scalars: dict[str, Any]) -> list[str]:
    """Names of the kernels that the GPU ran for `calls`, by torch.profiler (CUPTI)."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    _cuda_synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for arguments in calls:
            op(*arguments, **scalars)
        _cuda_synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
