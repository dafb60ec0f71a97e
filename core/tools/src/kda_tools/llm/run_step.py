"""`kda llm step`: a language model's step with upstream's kernels and with ours, interleaved in fresh processes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import gpu_state, provenance
from kda_tools.llm.capture import prepare
from kda_tools.llm.known_llms import KnownLlms, Llm
from kda_tools.llm.served_names import STAND_INS
from kda_tools.llm.served_phase import Phase
from kda_tools.llm.solution_ops import step_tasks
from kda_tools.llm.step_protocol import Checked, LlmStepRecord, PhaseAnswer, PhaseStep, StepAnswer, StepRequest
from kda_tools.models.calls import Call
from kda_tools.models.run_step import FEWEST_PROCESSES, deciding_hash, join_parts, solution_hashes
from kda_tools.models.worker_process import answers_of

WORKER = "kda_tools.llm.step_worker"
MODES = ("graph", "eager")
DECIDING = (
    *(f"llm/{name}.py" for name in ("kernel_imports", "served_step", "solution_ops", "step_ops", "step_worker")),
    *(f"models/{name}.py" for name in ("calls", "drift", "fitting", "interleaved", "kernels", "standins")),
    *("models/worker_process.py", "traces/kernel_classes.py"),
)
"""Files of the tools that can change a number."""


@dataclass(frozen=True)
class StepPlan:
    """What the user asked for."""

    model: str
    layers: int | None
    """None: all of the real model."""
    phases: tuple[Phase, ...]
    modes: tuple[str, ...]
    processes: int
    samples: int
    seed: int
    offline: bool
    allow_busy: bool
    command: str


def run(plan: StepPlan, known: KnownLlms, folder: Path, show: Callable[[str], None]) -> LlmStepRecord:
    """Run every phase with both arms; `show` gets a line for each phase of each process.

    Raises:
        UsageError: an unknown model, one whose step is not built here, an unknown mode, too few processes.
        MissingRequirement: a busy GPU, no memory for the weights, or upstream's wheel cannot be fetched.
        ArmFailed: a worker died, or an output is not finite.
    """
    for mode in plan.modes:
        if mode not in MODES:
            raise UsageError(f"--mode {mode}: expected {' or '.join(MODES)}")
    if plan.processes < FEWEST_PROCESSES:
        raise UsageError(f"--processes {plan.processes}: expected {FEWEST_PROCESSES} or more")
    pin = known.kernels.pin
    found = prepare(plan.model, known, pin, folder / pin.files, offline=plan.offline, allow_busy=plan.allow_busy)
    gpu, model = found.tree is not None, found.model
    git = provenance.git_state(checkout_root())
    begun, utc, run_id = time.monotonic(), provenance.utc(), provenance.run_id()
    layers = min(plan.layers or model.config.layers, model.config.layers)
    request = StepRequest(
        model=plan.model,
        tree=str(found.tree) if found.tree else None,
        release=pin.version,
        layers=layers,
        seed=plan.seed,
        phases=plan.phases,
        check=True,
        modes=plan.modes if gpu else (),
        samples=plan.samples,
    )
    later = request.model_copy(update={"check": False})
    requests = [request, *[later] * (plan.processes - 1 if gpu else 0)]
    answers = [answer.phases for answer in answers_of(WORKER, StepAnswer, requests, show)]
    after = gpu_state.read_state(0, own_pids=[os.getpid()]) if gpu else None
    steps = tuple(
        _merged(phase, parts, request.modes)
        for phase, parts in zip(plan.phases, zip(*answers, strict=True), strict=True)
    )
    machine = provenance.host()
    return LlmStepRecord(
        run_id=run_id,
        utc=utc,
        seconds=round(time.monotonic() - begun, 1),
        command=plan.command,
        model=plan.model,
        layers=layers,
        layers_of_model=model.config.layers,
        dtype="bfloat16" if gpu else "float32",
        seed=plan.seed,
        kernels=kernels(pin) if gpu else "PyTorch",
        files=hashlib.sha256((folder / pin.files).read_bytes()).hexdigest() if gpu else None,
        stand_ins=STAND_INS,
        hashes=hashes(step_tasks(), [call for step in steps for call in step.checked.calls], model),
        commit=git.commit,
        dirty=git.dirty,
        versions=provenance.versions(found.before.driver if found.before else None),
        machine=machine.model_copy(update={"kind": "cuda" if gpu else "cpu", "before": found.before, "after": after}),
        noisy=tuple(gpu_state.noise(found.before, after)) if found.before and after else (),
        phases=steps,
    )


def _merged(phase: Phase, parts: Sequence[PhaseAnswer], modes: Sequence[str]) -> PhaseStep:
    """One phase, from the answers of all processes; left out if any of them could not run it."""
    left_out = next((part.left_out for part in parts if part.left_out is not None), None)
    return PhaseStep(
        **phase.model_dump(),
        left_out=left_out,
        checked=parts[0].checked or Checked(),
        modes={mode: join_parts([part.timed[mode] for part in parts]) for mode in modes if left_out is None},
    )


def kernels(pin: Pin) -> str:
    """Package, version and sha256 of a wheel."""
    return f"{pin.package} {pin.version} {pin.wheel_sha256}"


def hashes(tasks: Sequence[Task], calls: Sequence[Call], model: Llm | None) -> dict[str, str]:
    """sha256 of what decides a run: the solutions that were called, `DECIDING`, and what is known of the model."""
    return solution_hashes(tasks, calls) | {"step": deciding_hash(DECIDING, model)}
