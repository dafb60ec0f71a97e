"""Collect the needed fields of a trace's events in columns: a few bytes per event instead of an object."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import msgspec

from kda_judge.contract.errors import UsageError
from kda_tools.traces.trace_read import Arguments, Event, TraceFile

NONE = -1
"""The number for a missing name, shape, place or correlation."""
STEP = "ProfilerStep#"
"""How torch.profiler names the range of a step."""
GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})


class Scope(IntEnum):
    """Kind of a range on the host. Of two ranges with the same times, the outer one has the smaller number."""

    ANNOTATION = 0
    FRAME = 1
    OPERATOR = 2


class Work(IntEnum):
    """What a GPU event is."""

    KERNEL = 0
    COPY = 1
    FILL = 2


SCOPES = {"user_annotation": Scope.ANNOTATION, "python_function": Scope.FRAME, "cpu_op": Scope.OPERATOR}
WORK = {"kernel": Work.KERNEL, "gpu_memcpy": Work.COPY, "gpu_memset": Work.FILL}
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
SIZES = msgspec.json.Decoder(list[list[Size | list[Size]] | str | float | None])
"""Decodes shapes or strides: one list for each tensor, and a list of lists for a list of tensors."""
TYPES = msgspec.json.Decoder(list[str | list[str]])


class Names:
    """Gives each distinct value a number, counted from 0."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, value: object) -> int:
        """The value's number, a new one at first sight."""
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[object]:
        """By number."""
        return list(self._numbers)


@dataclass
class HostThread:
    """Ranges of one thread."""

    start: array[float] = field(default_factory=lambda: array("d"))
    length: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("i"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    shape: array[int] = field(default_factory=lambda: array("i"))


@dataclass
class Launches:
    """Calls that put work on the GPU."""

    correlation: array[int] = field(default_factory=lambda: array("q"))
    thread: array[int] = field(default_factory=lambda: array("i"))
    start: array[float] = field(default_factory=lambda: array("d"))
    length: array[float] = field(default_factory=lambda: array("d"))
    graph: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class GpuWork:
    """Kernels, copies and fills; `correlation` is NONE where there is none."""

    start: array[float] = field(default_factory=lambda: array("d"))
    length: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("i"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    stream: array[int] = field(default_factory=lambda: array("i"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    moved: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class TraceEvents:
    """One trace. `shapes` holds (dims, types, strides) as JSON text, `steps` (start, end) of the profiler's steps."""

    path: Path
    sha256: str
    gpu: str
    names: list[str]
    shapes: list[tuple[bytes, bytes, bytes]]
    threads: list[HostThread]
    launches: Launches
    work: GpuWork
    steps: list[tuple[float, float]]


def collect(trace: TraceFile) -> TraceEvents:
    """Read all of `trace`.

    Raises:
        UsageError: as `TraceFile.batches`; no GPU events; those of several GPUs.
    """
    gathering = _Gathering()
    for batch in trace.batches():
        gathering.take(batch)
    gpus = sorted(gathering.gpus, key=str)
    if not gpus:
        raise UsageError(
            f"{trace.path}: expected GPU events (kernel, gpu_memcpy, gpu_memset), got none in {gathering.count} events;"
            " profile with ProfilerActivity.CUDA, while the GPU works"
        )
    if len(gpus) > 1:
        names = ", ".join(f"{device} (process {pid})" for pid, device in gpus)
        raise UsageError(f"{trace.path}: expected the events of one GPU, got those of {names}; give one rank's trace")
    return TraceEvents(
        path=trace.path,
        sha256=trace.sha256,
        gpu=trace.devices.get(gpus[0][1], ""),
        names=[str(name) for name in gathering.names.values()],
        shapes=[shape for shape in gathering.shapes.values() if isinstance(shape, tuple)],
        threads=gathering.hosts,
        launches=gathering.launches,
        work=gathering.work,
        steps=sorted(gathering.steps),
    )


class _Gathering:
    def __init__(self) -> None:
        self.names, self.shapes, self.streams, self.threads = Names(), Names(), Names(), Names()
        self.hosts: list[HostThread] = []
        self.launches, self.work = Launches(), GpuWork()
        self.steps: list[tuple[float, float]] = []
        self.gpus: set[tuple[int | str, int]] = set()
        self.count = 0

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.count += 1
            if event.ph != "X":
                continue
            category = event.cat
            if (scope := SCOPES.get(category)) is not None:
                self._range(event, scope)
            elif category in LAUNCHES:
                self._launch(event)
            elif (kind := WORK.get(category)) is not None:
                self._work(event, kind)

    def _thread(self, event: Event) -> int:
        number = self.threads.number((event.pid, event.tid))
        if number == len(self.hosts):
            self.hosts.append(HostThread())
        return number

    def _range(self, event: Event, kind: Scope) -> None:
        if event.name.startswith(STEP):
            self.steps.append((event.ts, event.ts + event.dur))
            return
        host = self.hosts[self._thread(event)]
        host.start.append(event.ts)
        host.length.append(event.dur)
        host.name.append(self.names.number(event.name))
        host.kind.append(kind)
        host.shape.append(self._shape(event.args) if kind is Scope.OPERATOR and event.args else NONE)

    def _shape(self, args: Arguments) -> int:
        dims = bytes(args.dims)
        return self.shapes.number((dims, bytes(args.types), bytes(args.strides))) if dims else NONE

    def _launch(self, event: Event) -> None:
        correlation = event.args.correlation if event.args else None
        if correlation is None:
            return
        launches = self.launches
        launches.correlation.append(correlation)
        launches.thread.append(self._thread(event))
        launches.start.append(event.ts)
        launches.length.append(event.dur)
        launches.graph.append(event.name in GRAPH_LAUNCHES)

    def _work(self, event: Event, kind: Work) -> None:
        args = event.args or Arguments()
        device = args.device if args.device is not None else event.pid if isinstance(event.pid, int) else 0
        self.gpus.add((event.pid, device))
        work = self.work
        work.start.append(event.ts)
        work.length.append(event.dur)
        work.name.append(self.names.number(event.name))
        work.kind.append(kind)
        work.stream.append(self.streams.number((event.pid, event.tid)))
        work.correlation.append(NONE if args.correlation is None else args.correlation)
        work.moved.append(max(args.moved or 0, 0))


def tensors(shape: tuple[bytes, bytes, bytes]) -> list[tuple[tuple[int, ...], str, tuple[int, ...] | None]]:
    """(dims, dtype, strides) of every tensor argument of an operator; strides are None if they were not recorded.

    The tensors of a list are listed one by one. Kineto writes a number as `[]` of type "Scalar" and an absent argument
    as `[]` of type ""; these are left out.

    Raises:
        msgspec.ValidationError: the text does not fit the format.
    """
    dims, types, strides = (
        SIZES.decode(shape[0]) if shape[0] else [],
        TYPES.decode(shape[1]) if shape[1] else [],
        SIZES.decode(shape[2]) if shape[2] else [],
    )
    found: list[tuple[tuple[int, ...], str, tuple[int, ...] | None]] = []
    for i, dim in enumerate(dims):
        kind = types[i] if i < len(types) else ""
        stride = strides[i] if i < len(strides) else None
        if not isinstance(dim, list) or kind in ("", "Scalar", "ScalarList", "None"):
            continue
        steps = stride if isinstance(stride, list) and len(stride) == len(dim) else None
        if dim and isinstance(dim[0], list):  # a list of tensors, whose element types stand in a list or in one word
            kinds = kind if isinstance(kind, list) else [_element(kind)] * len(dim)
            for one, its_kind, its_steps in zip(dim, kinds, steps or dim, strict=False):
                found.append((_sizes(one), its_kind, None if steps is None else _sizes(its_steps)))
        else:
            found.append((_sizes(dim), str(kind), None if steps is None else _sizes(steps)))
    return found


def _sizes(value: object) -> tuple[int, ...]:
    """The sizes or strides of one tensor."""
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        raise msgspec.ValidationError(f"expected a list of sizes or strides, got {value!r:.100}")
    return tuple(value)


def _element(kind: str) -> str:
    return "" if kind in ("TensorList", "GenericList") else kind


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements follow each other without gaps; strides of dimensions of length 1 do not matter."""
    size = 1
    for length, stride in reversed(list(zip(shape, strides, strict=True))):
        if length != 1 and stride != size:
            return False
        size *= length
    return True
