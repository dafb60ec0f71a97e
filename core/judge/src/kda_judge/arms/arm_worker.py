"""One arm's process: imports the arm, runs what the judge tells it, hands back outputs and times.

`fork_server.py` starts it. Expected outputs never exist here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import socket
import traceback
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any

from kda_judge.arms.arena import attach, view
from kda_judge.arms.arm_import import callable_of, import_arm, tensors_first
from kda_judge.arms.process_tree import supervise
from kda_judge.arms.protocol import (
    CHANGED,
    COLD,
    ArmSpec,
    Called,
    Captured,
    Channel,
    ChannelClosed,
    Chosen,
    Counted,
    Failure,
    Output,
    Place,
    Ready,
    RowSpec,
    Timed,
)
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tensor_spec import ITEM_SIZE, span

HELD_BYTES, HELD_SHARE = 4 << 30, 1 / 64
"""Most bytes of earlier outputs that a worker keeps, and the largest share of a GPU's memory that these take. Nine
workers may keep as much, and guards of the same size besides."""
SPARE_SHARE = 1 / 64
"""Share of a GPU's memory that a worker may hold unused after a call that is verified."""


@dataclass
class OpenRow:
    """What the worker holds while a row is open."""

    spec: RowSpec
    sets: list[tuple[Any, ...]]
    canary: tuple[Any, ...] | None
    slices: tuple[Any, ...] | None
    op: Any
    streams: list[Any]
    """Of the limits' worker: one of them is captured, the fastest. Other workers capture the op."""
    graphs: dict[str, Any] = field(default_factory=dict)
    """Kind of inputs, such as `COLD` -> graph."""
    last: Any = None
    """What the last timed call returned, until `collect`."""
    held: tuple[Any, ...] = ()
    """Outputs of single calls since the row was opened or timed, kept so that no later output gets their memory: those
    of the last call, and `HELD_BYTES` or fewer of earlier ones."""

    def sequence(self, count: int, canary: int | None, cold: bool = False) -> list[tuple[Any, ...]]:
        """Arguments of `count` calls: the hot input sets in turn, or if `cold` all; call `canary` gets the canary."""
        sets = self.sets if cold else self.sets[: self.spec.hot]
        calls = (sets * -(-count // len(sets)))[:count]
        if canary is not None:
            assert self.canary is not None
            calls[canary] = self.canary
        return calls


class Worker:
    """The state of one worker: the arm, the mapped arena, the open row."""

    def __init__(self, spec: ArmSpec) -> None:
        import torch

        from kda_judge.arms.clocks import Clock
        from kda_judge.arms.output_guards import guarded

        if spec.device.startswith("cuda"):
            torch.cuda.set_device(spec.device)  # as `import_arm` does, but the limits' worker imports no arm
        self._torch = torch
        self._guarded = guarded
        self._spec = spec
        self._clock = Clock(spec.device)
        self._cores = os.sched_getaffinity(0)
        # As serving frameworks run: with gradients on, some ops take a slower path through the dispatcher.
        torch.set_grad_enabled(False)
        self._memory = Memory(spec.device)
        self._copy = torch.Tensor.copy_
        self._held_bytes, self._spare_bytes = HELD_BYTES, 0
        if spec.device.startswith("cuda"):
            total = torch.cuda.get_device_properties(spec.device).total_memory
            self._held_bytes, self._spare_bytes = min(HELD_BYTES, int(total * HELD_SHARE)), int(total * SPARE_SHARE)
        for name, method in vars(type(self)).items():  # an arm that patches the class changes nothing here
            if callable(method) and name != "__init__":
                setattr(self, name, MethodType(method, self))
        self._module: Any = None if spec.limit else import_arm(spec)
        self._arena: Any = None
        self._base = 0
        self._open: OpenRow | None = None

    def attach(self, handle: dict[str, str | int]) -> Ready:
        """Map the judge's arena."""
        self._arena = attach(handle)
        self._base = self._arena.data_ptr()
        return Ready()

    def row(self, row: dict[str, Any]) -> Ready:
        """Open a row: build the argument tuples of every input set."""
        spec = RowSpec.model_validate_json(json.dumps(row))
        sets = [self._arguments(inputs) for inputs in spec.sets]
        canary, slices = (self._arguments(one) if one is not None else None for one in (spec.canary, spec.slices))
        if self._spec.limit:
            from kda_judge.arms.limit_arm import floors

            op, streams = floors(spec, self._arena)
        else:
            found = callable_of(self._module, self._spec, spec.op)
            op, streams = tensors_first(found, tuple(spec.sets[0]), spec.by_name), []
        self._open = OpenRow(spec, sets, canary, slices, op, streams)
        return Ready()

    def warm(self, streams: list[int] | None) -> Ready:
        """Make one unjudged call, so that kernels compile. The limits' worker calls all streams, or the known ones."""
        row = self._opened()
        if self._spec.limit:
            for one in row.streams if streams is None else [row.streams[number] for number in streams]:
                one()
        else:
            row.op(*row.sets[0], **row.spec.scalars)
        self._clock.synchronize()
        self._torch.cuda.empty_cache()
        return Ready()

    def choose(self, streams: list[int] | None) -> Chosen:
        """Choose the streams of which `capture` uses the fastest: the known ones, or those that win trials."""
        from kda_judge.arms.limit_arm import finalists

        row = self._opened()
        chosen = finalists(row.streams) if streams is None else streams
        row.streams = [row.streams[number] for number in chosen]
        return Chosen(streams=tuple(chosen))

    def verify(self, slices: bool = False, twice: bool = False) -> Called:
        """Call the op once on the first input set or on the slices, between guards; copy out what it returned.

        With `twice` the op is called again at once, on the same values: the second result needs memory of its own.
        """
        row = self._opened()
        arguments = row.slices if slices else row.sets[0]
        assert arguments is not None
        with self._guarded(self._spec, row.spec.outputs) as guards:
            for _ in range(1 + twice):
                result = row.op(*arguments, **row.spec.scalars)
                self._clock.synchronize()
                answer = self._hand_back(result)
                made = tuple(item for item in _items(result) if isinstance(item, self._torch.Tensor))
                row.held = _newest(row.held, self._held_bytes) + made
        del result
        self._give_back()
        return answer.model_copy(update={"overrun": guards.broken()})

    def _give_back(self) -> None:
        """Free what this arm has cached beyond `SPARE_SHARE`: the oracle and the other arms need memory, too."""
        cuda = self._torch.cuda
        if self._spare_bytes and cuda.memory_reserved() - cuda.memory_allocated() > self._spare_bytes:
            cuda.empty_cache()

    def wall(self, count: int, canary: int | None) -> Timed:
        """Time `count` back-to-back calls; call number `canary` runs on the canary set."""
        row = self._opened()
        row.last = None
        if self._spec.limit:  # its loop is in C
            total, events, _ = self._clock.wall(row.op, [(count,)], {})
        else:
            total, events, row.last = self._clock.wall(row.op, row.sequence(count, canary), row.spec.scalars)
        return Timed(calls=count, total_us=total, events_us=events)

    def latency(self, count: int) -> Timed:
        """Time `count` calls, each with a synchronise behind it."""
        row = self._opened()
        if self._spec.limit:
            return Timed(calls=count, total_us=self._clock.latency(row.op, [(1,)] * count, {}))
        return Timed(calls=count, total_us=self._clock.latency(row.op, row.sequence(count, None), row.spec.scalars))

    def capture(self, kind: str, count: int, canary: int | None = None, at: int | None = None) -> Captured:
        """Capture `count` calls into a CUDA graph; an op that cannot be captured says why.

        Before call `at` the graph copies the last input set over that call's set. If the op works in place and the
        first set is the only hot one, the call's result is saved in the last set, since later calls change the first.
        """
        from kda_judge.arms.clocks import Change, Graph

        row, change = self._opened(), None
        if at is not None:
            used, last = at % row.spec.hot, len(row.sets) - 1
            keep = row.spec.hot == 1 and bool(row.spec.inplace)
            change = Change(at, lambda: self._move(last, used), lambda: self._move(used, last) if keep else None)
        try:
            calls = row.sequence(count, canary, cold=kind == COLD)
            if self._spec.limit:
                from kda_judge.arms.limit_arm import fastest_graph

                row.graphs[kind] = fastest_graph(row.streams, calls)
            else:
                row.graphs[kind] = Graph(row.op, calls, row.spec.scalars, change)
        except Exception as error:  # noqa: BLE001  # whatever stops a capture, the row goes on without `device`
            return Captured(ok=False, note=f"{type(error).__name__}: {error}".splitlines()[0])
        return Captured(ok=True)

    def _move(self, source: int, target: int) -> None:
        """Copy one input set over another: they are laid out alike, one behind the other."""
        sets = self._opened().spec.sets[:2]
        start, second = (min(place.offset for place in one.values() if place is not None) for one in sets)
        blocks = self._arena[start : start + len(self._opened().sets) * (second - start)].view(-1, second - start)
        self._copy(blocks[target], blocks[source])

    def replay(self, kind: str, times: int) -> Timed:
        """Replay a captured graph."""
        row = self._opened()
        graph = row.graphs[kind]
        if kind == COLD and row.spec.flush:
            total, events = graph.replay_flushed(times, row.spec.flush)
        else:
            total, events = graph.replay(times)
        row.last = graph.out
        return Timed(calls=times * graph.calls, total_us=total, events_us=events)

    def collect(self, changed: bool = False) -> Called:
        """Hand back what the last timed call returned, or the call before which a graph's inputs changed."""
        row = self._opened()
        if changed:
            answer = self._hand_back(row.graphs.pop(CHANGED).changed)
            self._torch.cuda.empty_cache()  # frees the graph's pool, which is as large as the outputs
            return answer
        answer = self._hand_back(row.last)
        row.last = None
        return answer

    def profile(self, count: int) -> Counted:
        """Count the kernels of `count` calls."""
        from kda_judge.arms.clocks import count_kernels

        row = self._opened()
        names = count_kernels(row.op, row.sequence(count, None), row.spec.scalars)
        return Counted(calls=count, kernels=len(names))

    def pin(self, core: int | None) -> Ready:
        """Stay on one core while timing; None gives every core back (compilers want them)."""
        if self._open is not None:
            self._open.held = ()
        if core is not None:
            # What exists now stays: later collections (between timed regions) skip it and take no time.
            gc.collect()
            gc.freeze()
        os.sched_setaffinity(0, {core} if core is not None else self._cores)
        return Ready()

    def close(self) -> Ready:
        """Let go of the row, the graph and the arena."""
        if self._open is not None and self._open.graphs:
            self._open = None
            gc.collect()  # a graph's pool is freed with its last reference, which may sit in a cycle
        self._open = self._arena = None
        if self._spec.device.startswith("cuda"):
            self._torch.cuda.synchronize()
            self._torch.cuda.empty_cache()
        return Ready()

    def _opened(self) -> OpenRow:
        if self._open is None:
            raise RuntimeError("no row is open")
        return self._open

    def _arguments(self, inputs: dict[str, Place | None]) -> tuple[Any, ...]:
        return tuple(None if place is None else view(self._arena, place) for place in inputs.values())

    def _hand_back(self, result: Any) -> Called:
        """Describe what the op returned and copy it to its place when it fits."""
        if result is None:
            return Called(returned="None")
        several = type(result) in (tuple, list)  # no subclass: it could compute its items only when asked
        returned = result if several else (result,)
        kind = f"{type(result).__name__} of {len(returned)}" if several else "tensor"
        tensors = [item for item in returned if isinstance(item, self._torch.Tensor)]
        if len(tensors) != len(returned):
            other = next(item for item in returned if not isinstance(item, self._torch.Tensor))
            return Called(
                returned=f"{kind} with a {type(other).__name__}" if returned is result else type(other).__name__
            )
        wanted = self._opened().spec.outputs
        # Copied first, by address and without torch: an arm may have patched the tensor methods that follow.
        copied = len(tensors) == len(wanted) and all(
            self._memory.copy(tensor, self._base + place.offset, place)
            for tensor, place in zip(tensors, wanted, strict=True)
        )
        self._clock.synchronize()  # the driver does not wait for a copy inside the GPU
        occupied = [_reach(held) for held in self._opened().held]
        facts = []
        for tensor in tensors:
            facts.append(self._describe(tensor, occupied))
            occupied.append(_reach(tensor))
        return Called(returned=kind, outputs=tuple(facts), copied=copied)

    def _describe(self, tensor: Any, occupied: list[range]) -> Output:
        own, base = _reach(tensor), self._base
        return Output(
            type="Tensor" if type(tensor) is self._torch.Tensor else f"{type(tensor).__name__} (subclass)",
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            in_arena=_overlap(own, range(base, base + self._arena.numel())),
            shared=any(_overlap(own, other) for other in occupied),
        )


class Memory:
    """Copies outputs by address. Made before the arm is imported: what it needs of torch cannot be patched later."""

    def __init__(self, device: str) -> None:
        import torch

        tensor: Any = torch.Tensor
        self._type = tensor
        self._facts = (tensor.data_ptr, tensor.numel, tensor.element_size, tensor.is_contiguous)
        self._is_here = tensor.is_cuda.__get__ if device.startswith("cuda") else tensor.is_cpu.__get__
        self._no_modes: Any = torch._C.DisableTorchFunction
        self._copy: Any = ctypes.memmove
        if device.startswith("cuda"):
            self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2
            self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
            self._copy.errcheck = _demand_success

    def copy(self, tensor: Any, target: int, place: Place) -> bool:
        """Copy to address `target`; False unless the tensor is plain, contiguous, of its size and on the device."""
        if type(tensor) is not self._type:
            return False
        with self._no_modes():
            pointer, numel, width, contiguous = (fact(tensor) for fact in self._facts)
            here = self._is_here(tensor)
        size = span(place.shape, place.stride) * ITEM_SIZE[place.dtype]
        if not here or not contiguous or numel * width != size:
            return False
        if size:
            self._copy(target, pointer, size)
        return True


def _demand_success(code: int, *_: Any) -> None:
    if code:
        raise RuntimeError(f"cuMemcpyDtoD failed with CUDA error {code}")


def _reach(tensor: Any) -> range:
    """Addresses between a tensor's first and last element; none for a tensor without memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return range(0)
    start = tensor.data_ptr()
    return range(start, start + span(tuple(tensor.shape), tuple(tensor.stride())) * tensor.element_size())


def _newest(tensors: tuple[Any, ...], most_bytes: int) -> tuple[Any, ...]:
    """The last tensors, as many as have `most_bytes` or fewer together."""
    sizes = accumulate(len(_reach(tensor)) for tensor in reversed(tensors))
    return tensors[len(tensors) - sum(size <= most_bytes for size in sizes) :]


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _items(result: Any) -> tuple[Any, ...]:
    return tuple(result) if type(result) in (tuple, list) else (result,)


def serve(channel: Channel, spec: ArmSpec) -> None:
    """Answer commands until the judge hangs up."""
    worker: Worker | None = None
    receive, send = channel.receive, channel.send  # an arm that patches the class changes nothing here
    while True:
        message = receive(None)
        ident, command = message.pop("id"), message.pop("command")
        answer: Strict
        try:
            if command == "hello":
                worker = Worker(spec)
                answer = Ready()
            else:
                assert worker is not None
                answer = getattr(worker, command)(**message)
        except Exception as error:  # noqa: BLE001  # the judge gets whatever the arm raises
            answer = Failure(error=f"{type(error).__name__}: {error}"[:2000], traceback=traceback.format_exc()[-8000:])
        send({"id": ident, **answer.model_dump(mode="json")})


def main(descriptor: int, spec: str) -> None:
    """Run as a worker: `descriptor` is its end of the judge's socket pair, `spec` an `ArmSpec` as JSON."""
    supervise(descriptor)
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed):
        serve(channel, ArmSpec.model_validate_json(spec))
