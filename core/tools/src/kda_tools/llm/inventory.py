"""Make an inventory of a model's serving steps: the GPU time in each of its traces, as one file.

A trace of a capture is joined with the calls in `capture.json`, so the inputs of an operation come from the call
itself. For a trace of a server they are what its profiler recorded. A capture without a GPU has only calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Amount, Count, Digest, Strict, read_json
from kda_tools.llm import capture_record
from kda_tools.llm.capture_record import CapturedPhase, CaptureRecord
from kda_tools.llm.known_llms import EngineName
from kda_tools.llm.served_names import PREFIX, operation, trace_name
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.trace_events import collect
from kda_tools.traces.trace_profile import Attribution, Cost, Profile, profile
from kda_tools.traces.trace_read import TraceFile

SCHEMA_VERSION: Final = 1


class InventoryCost(Strict):
    """GPU time of one kernel from one place, over the whole trace."""

    kernel: str
    kind: KernelClass
    attribution: Attribution
    operator: str
    module: str
    frame: str
    inputs: tuple[capture_record.TensorOf, ...] | None
    us: Amount
    launches: Count
    calls: Count
    moved: Count


class InventoryPhase(Strict):
    """One trace, or one phase of a capture that has none."""

    name: str
    trace: str | None
    trace_sha256: Digest | None
    gpu: str
    steps: Annotated[int, Field(gt=0)]
    step_us: Amount
    """Microseconds from the start of a step to its end, including idle time."""
    gpu_us: Amount
    """Microseconds summed over the kernels of a step; every share is a part of this sum."""
    unattributed: Annotated[float, Field(ge=0, le=1)]
    eager_us: tuple[Amount, ...] = ()
    graph_us: tuple[Amount, ...] = ()
    costs: tuple[InventoryCost, ...]
    calls: tuple[capture_record.OperationCall, ...]
    """The calls of a capture's operations; empty for a server's trace."""


class Inventory(Strict):
    """One model, one engine."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    utc: str
    command: str
    model: str
    engine: str
    """Source of the kernels: an engine and its release, or `capture with` and the source that the capture names."""
    layers: Count | None
    """Number of layers of a capture; None: traces of a server, which runs all layers."""
    layers_of_model: Count | None
    stand_ins: tuple[str, ...]
    noisy: tuple[str, ...] = ()
    phases: Annotated[tuple[InventoryPhase, ...], Field(min_length=1)]

    @property
    def timed(self) -> bool:
        """Whether any phase has a trace of a GPU."""
        return any(phase.trace for phase in self.phases)


def log(folder: Path) -> Path:
    """Every recorded inventory; the models' pages are generated from it."""
    return folder / "docs" / "inventories.jsonl"


def read(path: Path) -> Inventory:
    """The inventory of a file; a broken one is a UsageError that names file and key."""
    if path.name == capture_record.FILE:
        raise UsageError(
            f"{path}: expected an inventory, got a capture: first run kda llm inventory {path.parent} --out FILE"
        )
    return read_json(Inventory, path)


def of_capture(folder: Path, run_id: str, utc: str, command: str) -> Inventory:
    """The inventory of a folder that `kda llm capture` made.

    Raises:
        UsageError: no capture is there, or a trace is missing, broken or not from this capture.
    """
    record = capture_record.read(folder)
    phases = []
    for phase in record.phases:
        if phase.left_out is None:
            phases.append(_captured_phase(folder, record, phase))
    if not phases:
        raise UsageError(f"{folder}: expected a phase that was captured, got none: {record.phases[0].left_out}")
    return Inventory(
        run_id=run_id,
        utc=utc,
        command=command,
        model=record.model,
        engine=f"capture with {record.kernels.rpartition(' ')[0] or record.kernels}",
        layers=record.layers,
        layers_of_model=record.layers_of_model,
        stand_ins=record.stand_ins,
        noisy=record.noisy,
        phases=tuple(phases),
    )


def of_traces(
    traces: Sequence[Path], steps: int | None, model: str, engine: str, run_id: str, utc: str, command: str
) -> Inventory:
    """The inventory of traces that a server wrote, one phase each.

    Raises:
        UsageError: a trace cannot be read, is from a capture or is given twice; or it marks no steps and `steps` is
            None; or the engine is not known.
    """
    if (name := engine.partition(" ")[0].lower()) not in get_args(EngineName):
        names = ", ".join(get_args(EngineName))
        raise UsageError(f"--engine {engine!r}: expected one of {names}, and its release, as 'sglang 0.5.23'")
    phases = list[InventoryPhase]()
    for path in traces:
        found = profile(collect(TraceFile(path)), steps)
        if steps is None and not found.recorded_steps:
            raise UsageError(f"{path}: it marks no steps, so say by --steps how many of them it holds")
        if any(PREFIX in cost.source.module for cost in found.costs):
            raise UsageError(f"{path}: expected a server's trace, got one of `kda llm capture`; give its folder")
        _demand_engine(path, name, found)
        phase = _phase(_name_of(path), found, calls=(), eager=(), graph=())
        for other in phases:
            if phase.name == other.name or phase.trace_sha256 == other.trace_sha256:
                raise UsageError(f"{path}: expected traces that differ in name and content, got {other.trace}, too")
        phases.append(phase)
    return Inventory(
        run_id=run_id,
        utc=utc,
        command=command,
        model=model,
        engine=engine,
        layers=None,
        layers_of_model=None,
        stand_ins=(),
        phases=tuple(phases),
    )


SUFFIXES = (".gz", ".json", ".trace", ".pt")
"""Suffixes that profilers add to a trace's name, in the order in which they are removed from its end."""


def _name_of(path: Path) -> str:
    """The file's name without `SUFFIXES`; other dots stay: they belong to a time, followed by rank and stage."""
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


ENGINE_MARKS = {"sglang": re.compile(r"sglang|sgl_kernel"), "vllm": re.compile(r"vllm")}


def _demand_engine(path: Path, asked: str, found: Profile) -> None:
    """Refuse a trace that names another engine, and not the one that was given."""
    texts = [f"{c.source.kernel} {c.source.operator} {c.source.module} {c.source.frame}" for c in found.costs]
    marked = {name for name, mark in ENGINE_MARKS.items() if any(mark.search(text) for text in texts)}
    if marked and asked not in marked:
        got = ", ".join(sorted(marked))
        raise UsageError(f"{path}: expected a trace of {asked}, got one with kernels of {got}; give the right --engine")


def _captured_phase(folder: Path, record: CaptureRecord, phase: CapturedPhase) -> InventoryPhase:
    if phase.trace is None:
        return InventoryPhase(
            name=phase.name,
            trace=None,
            trace_sha256=None,
            gpu="",
            steps=max(phase.steps, 1),
            step_us=0.0,
            gpu_us=0.0,
            unattributed=0.0,
            costs=(),
            calls=phase.calls,
        )
    path = folder / phase.trace
    found = profile(collect(TraceFile(path)), phase.steps)
    named = {operation(cost.source.module) for cost in found.costs} - {""}
    known = {trace_name(call.name) for call in phase.calls}
    if not named & known:
        raise UsageError(f"{path}: expected ranges of the capture's operations, got none: is it another trace?")
    return _phase(phase.name, found, phase.calls, phase.eager_us, phase.graph_us, gpu=record.gpu)


def _phase(
    name: str,
    found: Profile,
    calls: tuple[capture_record.OperationCall, ...],
    eager: tuple[float, ...],
    graph: tuple[float, ...],
    gpu: str | None = None,
) -> InventoryPhase:
    return InventoryPhase(
        name=name,
        trace=found.file,
        trace_sha256=found.sha256,
        gpu=found.gpu or gpu or "",
        steps=found.steps,
        step_us=found.step_us,
        gpu_us=found.gpu_us / found.steps,
        unattributed=found.share(found.unattributed_us),
        eager_us=eager,
        graph_us=graph,
        costs=tuple(_cost(cost) for cost in found.costs),
        calls=calls,
    )


def _cost(cost: Cost) -> InventoryCost:
    source = cost.source
    inputs = None
    if source.inputs is not None:
        inputs = tuple(
            capture_record.TensorOf(dtype=one.dtype, shape=one.shape, strides=one.strides or ())
            for one in source.inputs
        )
    return InventoryCost(
        kernel=source.kernel,
        kind=source.kind,
        attribution=source.attribution,
        operator=source.operator,
        module=source.module,
        frame=source.frame,
        inputs=inputs,
        us=cost.us,
        launches=cost.launches,
        calls=cost.calls,
        moved=cost.moved,
    )
