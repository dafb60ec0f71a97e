"""A phase of an inventory as a profile again, so that hotspots, catalogue and cards read it as they read a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from kda_tools.llm.capture_record import OperationCall, TensorOf
from kda_tools.llm.inventory import InventoryCost, InventoryPhase
from kda_tools.llm.served_names import operation, trace_name
from kda_tools.traces.trace_profile import Cost, Profile, Source, Tensor

TRACE_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "int64": "long",
    "int32": "int",
    "uint8": "unsigned char",
    "bool": "bool",
}
"""Name of a dtype in PyTorch -> its name in PyTorch's traces."""


def step_us(phase: InventoryPhase) -> float:
    """Microseconds of a step: as a CUDA graph, as in a server, if that was timed; else as traced."""
    return median(phase.graph_us) if phase.graph_us else phase.step_us


def as_profile(phase: InventoryPhase) -> Profile:
    """The phase as a profile, with a capture's operations in place of operators.

    Every kernel of an operation then belongs to one hotspot, with the inputs of the operation's call. If an operation
    was called with several sets of inputs, the trace does not say which call a kernel is from: its time is split in
    proportion to the calls.
    """
    by_name: dict[str, list[OperationCall]] = {}
    for call in phase.calls:
        by_name.setdefault(trace_name(call.name), []).append(call)
    costs = [made for cost in phase.costs for made in _costs(cost, by_name, phase.steps)]
    total = sum(cost.us for cost in costs)
    return Profile(
        file=phase.trace or phase.name,
        sha256=phase.trace_sha256 or "0" * 64,
        gpu=phase.gpu,
        steps=phase.steps,
        recorded_steps=phase.steps,
        span_us=step_us(phase) * phase.steps,
        gpu_us=total,
        busy_us=total,
        host_us=0.0,
        unknown_us=0.0,
        before_us=0.0,
        streams=1,
        communication_us=0.0,
        exposed_us=0.0,
        costs=sorted(costs, key=lambda cost: (-cost.us, repr(cost.source))),
        gaps=[],
    )


def _costs(cost: InventoryCost, by_name: Mapping[str, Sequence[OperationCall]], steps: int) -> Iterable[Cost]:
    name = operation(cost.module)
    calls = by_name.get(name, ())
    if not calls:
        inputs = None if cost.inputs is None else tuple(_tensor(one) for one in cost.inputs)
        yield Cost(_source(cost, cost.operator, cost.module, inputs), cost.us, cost.launches, cost.calls, cost.moved)
        return
    total = sum(call.calls_a_step for call in calls)
    for call in calls:
        part = call.calls_a_step / total
        inputs = tuple(_tensor(one, TRACE_TYPES) for one in call.tensors)
        yield Cost(
            _source(cost, name, "", inputs),
            cost.us * part,
            round(cost.launches * part),
            round(call.calls_a_step * steps),
            round(cost.moved * part),
        )


def _tensor(one: TensorOf, types: Mapping[str, str] | None = None) -> Tensor:
    fits = len(one.strides) == len(one.shape)
    dtype = (types or {}).get(one.dtype, one.dtype)
    return Tensor(one.shape, dtype, one.strides if fits else None)


def _source(cost: InventoryCost, operator: str, module: str, inputs: tuple[Tensor, ...] | None) -> Source:
    return Source(cost.kernel, cost.kind, cost.attribution, operator, module, cost.frame, inputs)
