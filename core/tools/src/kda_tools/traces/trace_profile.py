"""Sum a trace up: GPU time by kernel and by the place that launched it, idle time, and gaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from kda_judge.contract.errors import UsageError
from kda_tools.traces.kernel_classes import KernelClass, classify
from kda_tools.traces.trace_events import NONE, TraceEvents, Work, tensors
from kda_tools.traces.trace_places import Place, Places


class Attribution(str, Enum):
    """How a kernel was traced back to what launched it."""

    OPERATOR = "operator"
    """Its launch lies inside of an operator."""
    FRAME = "frame"
    """No operator, but a module or a Python frame, as of a Triton kernel launched directly."""
    ANNOTATION = "annotation"
    """The launch lies only in ranges that the user named: they say where it is, not what it does."""
    GRAPH = "CUDA graph"
    """A graph launches all of its kernels at once; nothing says which operator each belongs to."""
    BARE = "bare launch"
    """Nothing is recorded around its launch."""
    NO_LAUNCH = "no launch"
    """The trace has no launch with the kernel's correlation: it was before the trace, or CPU activities are missing."""


LONGEST_GAPS = 10
UNATTRIBUTED = (Attribution.GRAPH, Attribution.BARE, Attribution.NO_LAUNCH)


@dataclass(frozen=True)
class Tensor:
    """An operator's input. `strides` is None if not recorded; `dtype` is "" if a list of tensors hides it."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Source:
    """The key by which GPU time is summed: a kernel and the place of its launch. `inputs` None: no shapes recorded."""

    kernel: str
    kind: KernelClass
    attribution: Attribution
    operator: str
    module: str
    frame: str
    inputs: tuple[Tensor, ...] | None


@dataclass
class Cost:
    """The sum over one source, of the whole window."""

    source: Source
    us: float = 0.0
    launches: int = 0
    calls: int = 0
    """Calls of the operator; one call may launch a kernel several times."""
    moved: int = 0
    """Bytes of copies and fills, as the driver reports them."""


class Gap(NamedTuple):
    """An idle time of the GPU, and the part of it that the host caused."""

    at_us: float
    """Start of the gap, in microseconds since the window's start."""
    us: float
    host_us: float
    known: bool
    """Whether the launch of the kernel that ended it is in the trace."""
    before: str
    after: str


@dataclass(frozen=True)
class Profile:
    """A trace's sums, in microseconds over the whole window of `steps` steps.

    - The window begins at the first profiler step. It ends with the last profiler step or the last GPU event, whichever
      is later. Without profiler steps it goes from the first GPU event's start to the last one's end.
    - gpu_us: sum over kernels, copies and fills; overlapping work counts twice.
    - busy_us: length of the union of their intervals. idle share = 1 - busy / span.
    - host_us: the part of idle time before the launch of the kernel that ends it: for a gap [a, b) ended by a kernel
      whose launch call returned at t, min(max(t - a, 0), b - a). After the last kernel nothing was launched, so all of
      that time counts. host-bound share = host / span.
    - unknown_us: gaps ended by a kernel whose launch the trace lacks. In the rest of idle time a kernel was launched
      and waited for the driver, an event or another stream.
    - communication_us: union of the communication kernels; exposed_us: the part in which nothing else ran.
    """

    file: str
    sha256: str
    gpu: str
    steps: int
    recorded_steps: int
    span_us: float
    gpu_us: float
    busy_us: float
    host_us: float
    unknown_us: float
    before_us: float
    """Time of GPU events that began before the window; they count nowhere else."""
    streams: int
    communication_us: float
    exposed_us: float
    costs: list[Cost] = field(repr=False)
    gaps: list[Gap] = field(repr=False)
    """The longest ones, longest first."""

    def share(self, us: float) -> float:
        """`us` as a share of the GPU's time, 0 to 1."""
        return us / self.gpu_us if self.gpu_us else 0.0

    @property
    def step_us(self) -> float:
        """Microseconds of one step: the window's length over the steps."""
        return self.span_us / self.steps

    @property
    def idle_us(self) -> float:
        """Microseconds of the window in which the GPU ran nothing."""
        return self.span_us - self.busy_us

    def attributed_us(self, how: Attribution) -> float:
        """GPU time of the kernels with this attribution."""
        return sum(cost.us for cost in self.costs if cost.source.attribution is how)

    @property
    def unattributed_us(self) -> float:
        """GPU time that no operator, frame or annotation is known for."""
        return sum(self.attributed_us(how) for how in UNATTRIBUTED)


class _Event(NamedTuple):
    start: float
    end: float
    us: float  # as recorded; end - start is less exact if the clock counts from the epoch
    name: int
    kind: int
    stream: int
    correlation: int
    moved: int


def profile(events: TraceEvents, steps: int | None = None) -> Profile:
    """Sum a trace up. `steps`: how many it holds; None: as many as the profiler marked, or one if it marked none.

    Raises:
        UsageError: no GPU event takes any time.
    """
    places = Places(events)
    work = events.work
    columns = (work.start, work.length, work.name, work.kind, work.stream, work.correlation, work.moved)
    found = [_Event(row[0], row[0] + row[1], *row[1:]) for row in zip(*columns, strict=True)]
    found.sort(key=lambda event: (event.start, event.correlation, event.stream, event.end))
    start = events.steps[0][0] if events.steps else found[0].start
    inside = [event for event in found if event.start >= start]
    end = max([event.end for event in inside] + [last for _, last in events.steps])
    if end <= start:
        raise UsageError(f"{events.path}: expected GPU events that take time, got none longer than 0 us")
    gaps = list(_gaps(inside, start, end, places, events.names))
    costs = _costs(inside, events, places)
    kinds = {cost.source.kernel: cost.source.kind for cost in costs}
    talking = [kinds[events.names[event.name]] is KernelClass.COMMUNICATION for event in inside]
    busy = _union(inside)
    return Profile(
        file=events.path.name,
        sha256=events.sha256,
        gpu=events.gpu,
        steps=steps or len(events.steps) or 1,
        recorded_steps=len(events.steps),
        span_us=end - start,
        gpu_us=sum(event.us for event in inside),
        busy_us=busy,
        host_us=sum(gap.host_us for gap in gaps),
        unknown_us=sum(gap.us for gap in gaps if not gap.known),
        before_us=sum(event.us for event in found if event.start < start),
        streams=len({event.stream for event in inside}),
        communication_us=_union(event for event, talks in zip(inside, talking, strict=True) if talks),
        exposed_us=busy - _union(event for event, talks in zip(inside, talking, strict=True) if not talks),
        costs=sorted(costs, key=lambda cost: (-cost.us, repr(cost.source))),
        gaps=sorted(gaps, key=lambda gap: (-gap.us, gap.at_us))[:LONGEST_GAPS],
    )


def _union(events: Iterable[_Event]) -> float:
    """Length of the union of intervals that are ordered by their starts."""
    total, reached = 0.0, float("-inf")
    for event in events:
        if event.end > reached:
            total += event.end - max(event.start, reached)
            reached = event.end
    return total


def _gaps(events: list[_Event], start: float, end: float, places: Places, names: list[str]) -> Iterator[Gap]:
    reached, before = start, ""
    for event in events:
        if event.start > reached:
            us = event.start - reached
            returned = places.returned.get(event.correlation)
            late = 0.0 if returned is None else min(max(returned - reached, 0.0), us)
            yield Gap(reached - start, us, late, returned is not None, before, names[event.name])
        if event.end > reached:
            reached, before = event.end, names[event.name]
    if end > reached:
        yield Gap(reached - start, end - reached, end - reached, True, before, "")


def _costs(events: list[_Event], trace: TraceEvents, places: Places) -> list[Cost]:
    sources: dict[tuple[object, ...], Cost] = {}
    last_call: dict[tuple[object, ...], int] = {}
    try:
        inputs = [tuple(Tensor(*one) for one in tensors(shape)) for shape in trace.shapes]
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{trace.path}: an operator's inputs are not as the trace format has them: {error}") from None
    nowhere = Place()
    for event in events:
        place = places.of.get(event.correlation, nowhere)
        how = _attribution(event, place, places)
        if how in UNATTRIBUTED:
            place = nowhere
        key = (event.name, event.kind, how, place.operator, place.module, place.frame, place.shape)
        cost = sources.get(key)
        if cost is None:
            kernel = trace.names[event.name]
            operator = trace.names[place.operator] if place.operator != NONE else ""
            module = places.modules[place.module] if place.module != NONE else ""
            frame = trace.names[place.frame] if place.frame != NONE else ""
            kind = classify(kernel, operator, module) if event.kind == Work.KERNEL else KernelClass.COPY
            shape = inputs[place.shape] if place.shape != NONE else None
            cost = sources[key] = Cost(Source(kernel, kind, how, operator, module, frame, shape))
        cost.us += event.us
        cost.launches += 1
        cost.moved += event.moved
        call = place.call if place.call != NONE else -2 - cost.launches  # without an operator each launch is a call
        if last_call.get(key) != call:
            last_call[key] = call
            cost.calls += 1
    return list(sources.values())


def _attribution(event: _Event, place: Place, places: Places) -> Attribution:
    if event.correlation not in places.of:
        return Attribution.NO_LAUNCH
    if event.correlation in places.graphs:
        return Attribution.GRAPH
    if place.operator != NONE:
        return Attribution.OPERATOR
    if place.framed:
        return Attribution.FRAME
    return Attribution.ANNOTATION if place.module != NONE else Attribution.BARE
