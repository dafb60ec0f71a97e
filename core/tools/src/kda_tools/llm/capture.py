"""Run `kda llm capture`: a model's step in this process, under torch.profiler and in a CUDA graph.

Without a GPU the step has the same structure, its operations are PyTorch's, and only the inputs of the calls are kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kda_judge.arms import upstream
from kda_judge.arms.clocks import capturing
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root
from kda_judge.evidence import gpu_state, provenance
from kda_judge.evidence.gpu_state import GpuState
from kda_tools.llm.capture_record import FILE, CapturedPhase, CaptureRecord, OperationCall, TensorOf
from kda_tools.llm.known_llms import KnownLlms, Llm
from kda_tools.llm.served_names import is_stand_in
from kda_tools.llm.served_phase import phases
from kda_tools.llm.served_step import Calls, ServedStep, Signature
from kda_tools.llm.step_ops import PlainOps, StepOps, UpstreamOps

WARM_UP = 3
CPU_MOST = 1024
"""Widest hidden state that is built without a GPU."""


@dataclass(frozen=True)
class CapturePlan:
    """What the user asked for."""

    model: str
    layers: int | None
    """None: all of the real model."""
    prefill: tuple[int, ...]
    """Prefill phases: tokens of the one sequence, one number for each phase."""
    decode: tuple[int, ...]
    """Sequences with one new token each."""
    kv: int
    """Tokens of each of these."""
    steps: int
    samples: int
    """Number of times that a step is timed."""
    seed: int
    folder: Path
    offline: bool
    allow_busy: bool
    command: str


@dataclass(frozen=True)
class Prepared:
    """A model whose step can be built here, and with what."""

    model: Llm
    before: GpuState | None
    """State of the GPU before the run; None without a GPU."""
    tree: Path | None
    """The wheel's verified files; None without a GPU, where no kernel of it runs."""


def prepare(name: str, known: KnownLlms, pin: Pin, lock: Path, *, offline: bool, allow_busy: bool) -> Prepared:
    """Check that the model's step can be built here; on a GPU also fetch upstream's kernels.

    Raises:
        UsageError: an unknown model, one whose structure is not built here, or one too wide for a CPU.
        MissingRequirement: a busy GPU, or upstream's wheel cannot be fetched.
    """
    model = known.model(name)
    if not model.captured:
        fitting = ", ".join(known_name for known_name, one in known.models.items() if one.captured)
        raise UsageError(f"{name}: expected a model whose step is built here, {fitting}")
    if not gpu_state.has_gpu():
        if model.config.hidden_size > CPU_MOST:
            raise UsageError(f"{name}: there is no GPU, and its step is too large for a CPU; take tiny or tiny-moe")
        return Prepared(model, None, None)
    before = gpu_state.read_state(0)
    if (reason := gpu_state.busy(before)) and not allow_busy:
        raise MissingRequirement(f"{reason}; wait, or go on all the same with --allow-busy")
    upstream.check_python(pin, "kernels of a capture")
    return Prepared(model, before, upstream.fetch(pin, lock, upstream.cache_folder(checkout_root()), offline=offline))


def run(plan: CapturePlan, known: KnownLlms, pin: Pin, lock: Path, report: Callable[[str], None]) -> CaptureRecord:
    """Capture every phase, and write traces and record into the folder.

    Raises:
        UsageError: an unknown model, one whose structure is not built here, or one too wide for a CPU.
        MissingRequirement: a busy GPU, no memory for the weights, or upstream's wheel cannot be fetched.
    """
    found = prepare(plan.model, known, pin, lock, offline=plan.offline, allow_busy=plan.allow_busy)
    model, before, gpu = found.model, found.before, found.tree is not None
    git = provenance.git_state(checkout_root())
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    layers = min(plan.layers or model.config.layers, model.config.layers)
    ops: StepOps = PlainOps() if found.tree is None else UpstreamOps(found.tree, pin.version)
    utc, run_id = provenance.utc(), provenance.run_id()
    with torch.inference_mode():
        try:
            served = ServedStep(model.config, layers, ops, device, dtype, plan.seed)
        except RuntimeError as error:
            raise MissingRequirement(
                f"{plan.model}, {layers} layers: {out_of_memory(error)}; take fewer --layers"
            ) from None
        phases = tuple(_phases(plan, served, report))
    after = gpu_state.read_state(0, own_pids=[os.getpid()]) if gpu else None
    names = {call.name for phase in phases for call in phase.calls}
    record = CaptureRecord(
        run_id=run_id,
        utc=utc,
        command=plan.command,
        model=plan.model,
        layers=layers,
        layers_of_model=model.config.layers,
        device="cuda" if gpu else "cpu",
        gpu=before.name if before else None,
        dtype=str(dtype).removeprefix("torch."),
        seed=plan.seed,
        kernels=f"{pin.package} {pin.version} {pin.wheel_sha256}" if gpu else "PyTorch",
        files=hashlib.sha256(lock.read_bytes()).hexdigest() if gpu else None,
        stand_ins=tuple(sorted(name for name in names if is_stand_in(name))),
        commit=git.commit,
        dirty=git.dirty,
        versions=provenance.versions(before.driver if before else None),
        noisy=tuple(gpu_state.noise(before, after)) if before and after else (),
        phases=phases,
    )
    (plan.folder / FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return record


def _phases(plan: CapturePlan, served: ServedStep, report: Callable[[str], None]) -> Iterator[CapturedPhase]:
    for kind in phases(plan.prefill, plan.decode, plan.kv):
        report(f"{plan.model} {kind.name}")
        empty = CapturedPhase(**kind.model_dump(), steps=plan.steps, calls=(), trace=None)
        try:
            yield _phase(plan, served, empty)
        except RuntimeError as error:
            why = out_of_memory(error)
            torch.cuda.empty_cache()
            yield empty.model_copy(update={"left_out": why})


def out_of_memory(error: RuntimeError) -> str:
    """The message of a failed allocation; any other error is raised again."""
    if not isinstance(error, torch.cuda.OutOfMemoryError) and "allocate memory" not in str(error):
        raise error
    return f"out of memory: {str(error).splitlines()[0]}"


def _phase(plan: CapturePlan, served: ServedStep, empty: CapturedPhase) -> CapturedPhase:
    cuda = served.device.type == "cuda"
    step = served.step(empty.batch, empty.new_tokens, empty.kv_tokens)
    eager: tuple[float, ...] = ()
    graph: tuple[float, ...] = ()
    refused = trace = None
    if cuda:
        for _ in range(WARM_UP):
            step()
        eager = _times(step, plan.samples)
        try:
            graph = _graph_times(step, plan.samples)
        except RuntimeError as error:
            refused = str(error).splitlines()[0]
    served.calls.seen.clear()
    try:
        if cuda:
            trace = f"{plan.model}-{empty.name}.trace.json"
            _profile(step, plan.steps, plan.folder / trace, served.calls)
        else:
            served.calls.on = True
            for _ in range(plan.steps):
                step()
    finally:
        served.calls.on = False
    calls = tuple(
        OperationCall(name=name, tensors=_tensors(signature), calls_a_step=count / plan.steps)
        for (name, signature), count in served.calls.seen.items()
    )
    return empty.model_copy(
        update={"calls": calls, "trace": trace, "eager_us": eager, "graph_us": graph, "graph_refused": refused}
    )


def _tensors(signature: Signature) -> tuple[TensorOf, ...]:
    return tuple(TensorOf(dtype=dtype, shape=shape, strides=strides) for dtype, shape, strides in signature)


def _times(step: Callable[[], object], samples: int) -> tuple[float, ...]:
    """Microseconds of single steps, between two CUDA events."""
    found = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        step()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return tuple(found)


def _graph_times(step: Callable[[], object], samples: int) -> tuple[float, ...]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        step()
    graph.replay()
    return _times(graph.replay, samples)


def _profile(step: Callable[[], object], steps: int, trace: Path, calls: Calls) -> None:
    """Write a trace of so many steps, each of them marked, and count their calls; one step before warms up."""
    from torch.profiler import ProfilerActivity, profile, schedule

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    once = schedule(wait=0, warmup=1, active=steps, repeat=1)  # else a second round is exported
    with profile(activities=kinds, record_shapes=True, schedule=once) as profiler:
        for number in range(steps + 1):
            calls.on = number > 0
            step()
            torch.cuda.synchronize()
            profiler.step()
    profiler.export_chrome_trace(str(trace))
