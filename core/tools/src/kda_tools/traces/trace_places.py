"""Where each launch came from: the operator, module and Python frame around it on its thread."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kda_tools.traces.trace_events import NONE, HostThread, Scope, TraceEvents

BLOCK = 1 << 16
"""Events turned into Python numbers at once."""
MODULE = "nn.Module: "
NUMBER = re.compile(r"\d+")
INSTANCE = re.compile(r"_\d+$")
LAUNCHERS = re.compile(r"^<|(^|/)((torch|triton|cutlass|nvidia_cutlass_dsl|tvm_ffi|cuda)/|fast_launch\.py\()")
"""Frames that launch for others and so say nothing: built-ins, the insides of frameworks, SGLang's cached launcher."""


class Place(NamedTuple):
    """The ranges around a launch, as indices of `TraceEvents` and `Places.modules`; NONE: there is no such range."""

    operator: int = NONE
    call: int = NONE
    """Which call of the operator: no two calls of a trace share it."""
    shape: int = NONE
    module: int = NONE
    frame: int = NONE
    framed: bool = False
    """Inside of a module or a frame, not of annotations alone."""


class _Range(NamedTuple):
    """A range of a thread; `number` counts them."""

    end: float
    kind: int
    name: int
    shape: int
    number: int


class _Open(NamedTuple):
    """An open range on the stack; `earliest` is the first end of this range and of those around it."""

    end: float
    earliest: float
    place: Place
    range: _Range


class Places:
    """For each correlation, the place of its launch (`of`) and the time when the launch call returned (`returned`)."""

    def __init__(self, events: TraceEvents) -> None:
        self.modules: list[str] = []
        """Path of module classes and annotations, `Transformer/Block/Attention`: layers of one kind share it."""
        self.of: dict[int, Place] = {}
        self.returned: dict[int, float] = {}
        self.graphs: set[int] = set()
        """Correlations of launches of CUDA graphs."""
        self._names = events.names
        self._paths: dict[tuple[int, str], int] = {}
        self._ranges = 0
        launches = events.launches
        correlations = np.asarray(launches.correlation, dtype=np.int64)
        starts, lengths = np.asarray(launches.start), np.asarray(launches.length)
        self.returned = dict(zip(launches.correlation, (starts + lengths).tolist(), strict=True))
        self.graphs = set(correlations[np.asarray(launches.graph, dtype=bool)].tolist())
        of_thread = np.asarray(launches.thread)
        for number, thread in enumerate(events.threads):
            mine = of_thread == number
            if mine.any():
                self._sweep(thread, correlations[mine], starts[mine])

    def _sweep(self, thread: HostThread, correlations: np.ndarray, launched: np.ndarray) -> None:
        """Walk along one thread with the stack of the ranges that are open."""
        stack: list[_Open] = []
        nowhere = Place()
        for start, length, name, kind, payload in _in_order(thread, correlations, launched):
            while stack and stack[-1].end <= start:
                stack.pop()
            if stack and stack[-1].earliest <= start:
                stack = self._without_ended(stack, start)
            around = stack[-1].place if stack else nowhere
            if kind is None:
                self.of[payload] = around
            else:
                self._ranges += 1
                self._push(stack, _Range(start + length, kind, name, payload, self._ranges))

    def _push(self, stack: list[_Open], one: _Range) -> None:
        around, earliest = (stack[-1].place, stack[-1].earliest) if stack else (Place(), one.end)
        stack.append(_Open(one.end, min(one.end, earliest), self._within(around, one), one))

    def _without_ended(self, stack: list[_Open], now: float) -> list[_Open]:
        """The stack without ranges that ended by `now`; the others are placed anew, within those that are left.

        A frame whose return the tracer has missed seems to last longer than the operator that called it, and would
        credit that operator with what is launched after it.
        """
        kept: list[_Open] = []
        for one in stack:
            if one.end > now:
                self._push(kept, one.range)
        return kept

    def _within(self, around: Place, one: _Range) -> Place:
        if one.kind == Scope.OPERATOR:
            return around._replace(operator=one.name, call=one.number, shape=one.shape)
        text = self._names[one.name]
        if one.kind == Scope.ANNOTATION:  # numbers in it count layers, steps or tokens
            return around._replace(module=self._path(around.module, NUMBER.sub("#", text)))
        if text.startswith(MODULE):
            path = self._path(around.module, INSTANCE.sub("", text.removeprefix(MODULE)))
            return around._replace(module=path, framed=True)
        return around if LAUNCHERS.search(text) else around._replace(frame=one.name, framed=True)

    def _path(self, parent: int, name: str) -> int:
        key = (parent, name)
        if key not in self._paths:
            self._paths[key] = len(self.modules)
            self.modules.append(f"{self.modules[parent]}/{name}" if parent != NONE else name)
        return self._paths[key]


def _in_order(
    thread: HostThread, correlations: np.ndarray, launched: np.ndarray
) -> Iterator[tuple[float, float, int, int | None, int]]:
    """Ranges (start, length, name, kind, shape) and launches (start, 0, NONE, None, correlation), outer first."""
    launch = len(Scope)  # sorts behind every range that begins with it
    count = len(launched)
    start = np.concatenate([np.asarray(thread.start), launched])
    length = np.concatenate([np.asarray(thread.length), np.zeros(count)])
    name = np.concatenate([np.asarray(thread.name, dtype=np.int64), np.full(count, NONE)])
    kind = np.concatenate([np.asarray(thread.kind, dtype=np.int64), np.full(count, launch)])
    payload = np.concatenate([np.asarray(thread.shape, dtype=np.int64), correlations])
    order = np.lexsort((kind, -length, kind == launch, start))
    for first in range(0, len(order), BLOCK):
        block = order[first : first + BLOCK]
        columns = (start, length, name, kind, payload)
        for ts, dur, label, what, value in zip(*(column[block].tolist() for column in columns), strict=True):
            yield ts, dur, label, None if what == launch else what, value
