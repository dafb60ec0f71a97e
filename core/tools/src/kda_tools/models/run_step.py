"""`kda model step`: workers in fresh processes, and the record made of what they found."""

from __future__ import annotations

import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kda_tools
from kda_judge.contract.errors import ArmFailed, MissingRequirement, UsageError
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tasks import Task, checkout_root, find_tasks
from kda_judge.evidence import gpu_state, provenance, stats
from kda_judge.evidence.gpu_watch import Watcher
from kda_tools.models import deferred_layouts, deferred_lines, known_models
from kda_tools.models.calls import Call
from kda_tools.models.chain_sites import Site, sites_of
from kda_tools.models.deferred_ways import WAYS
from kda_tools.models.known_models import KnownModels, Model, Sizes
from kda_tools.models.protocol import Answer, Census, Request, Timed
from kda_tools.models.step_flow import StepFlow
from kda_tools.models.step_record import Mode, StepArm, StepRecord
from kda_tools.models.worker_process import answers_of
from kda_tools.publish import staleness

FEWEST_PROCESSES = 3
"""Fewest processes of a measurement: processes differ from their start on, which is part of the noise."""
MODES = ("eager", "graph", "compile")
WORKER = "kda_tools.models.worker"
TINY_LAYERS = 2
NOT_COMPUTED: dict[str, Any] = {"exports": {}, "check": False, "denoise": 0, "modes": (), "samples": 1, "seed": 0}
"""Fields of a request that only looks at shapes."""
DENOISE, TINY_DENOISE = 50, 2
"""Default numbers of denoising steps: on a GPU, and without one."""


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    model: str
    release: str
    arm: StepArm = "solution"
    layers: int | None = None
    """None: all of them on a GPU, two without one."""
    seed: int = 0
    processes: int = FEWEST_PROCESSES
    samples: int = 12
    denoise: int | None = None
    """None: `DENOISE`, without a GPU `TINY_DENOISE`."""
    modes: tuple[str, ...] = MODES
    offline: bool = False
    allow_busy: bool = False
    command: str = ""
    trace: Path | None = None
    """Where to keep one profile of upstream's step."""


def run(plan: Plan, known: KnownModels, folder: Path, show: Callable[[str], None] = lambda _: None) -> StepRecord:
    """Run one model's step with upstream's ops and with the arm's; `show` gets lines on the progress of each process.

    Raises:
        UsageError: an unknown model, release or mode, or too few processes.
        MissingRequirement: too little memory, a package that is not installed, a GPU that is busy, no GPU for a trace.
        UpstreamError: the wheel is not what its pin says, or the class does not import.
        ArmFailed: a worker died, or an output is not finite.
    """
    from kda_tools.models.boot import obtain

    model, pin = known.model(plan.model), known.pin(plan.model, plan.release)
    for mode in plan.modes:
        if mode not in MODES:
            raise UsageError(f"--mode {mode}: expected {', '.join(MODES)}")
    if plan.processes < FEWEST_PROCESSES:
        raise UsageError(f"--processes {plan.processes}: expected {FEWEST_PROCESSES} or more")
    gpu = gpu_state.has_gpu()
    if plan.trace is not None and not gpu:
        raise MissingRequirement(
            f"--trace {plan.trace}: expected a GPU, whose kernels a trace is of; there is none here, so nothing is kept"
        )
    before = gpu_state.read_state(0) if gpu else None
    if before and (reason := gpu_state.busy(before)) and not plan.allow_busy:
        raise MissingRequirement(f"{reason}; wait, or measure all the same with --allow-busy")
    asked = plan.layers if plan.layers is not None else (0 if gpu else TINY_LAYERS)
    layers = model.shortened(asked)
    tasks = [task for task in find_tasks() if task.family == known_models.FOLDER.parts[0]]
    git = provenance.git_state(checkout_root())
    begun, utc, run_id = time.monotonic(), provenance.utc(), provenance.run_id()
    tree = obtain(pin, folder / pin.files, offline=plan.offline)
    watched = Watcher(0) if gpu else nullcontext()
    with watched as watcher, _exports(tasks if plan.arm == "portable" else []) as exports:
        request = Request(
            model=plan.model,
            release=plan.release,
            tree=str(tree),
            sizes=model.sizes if gpu else model.tiny,
            layers=layers,
            seed=plan.seed,
            arm=plan.arm,
            exports=exports,
            check=True,
            denoise=plan.denoise if plan.denoise is not None else (DENOISE if gpu else TINY_DENOISE),
            modes=plan.modes if gpu else (),
            samples=plan.samples,
        )
        later = request.model_copy(update={"check": False, "denoise": 0})
        requests = [request, *[later] * (plan.processes - 1 if gpu else 0)]
        if plan.trace is not None:
            requests[-1] = requests[-1].model_copy(update={"trace": str(plan.trace.absolute())})
        answers = []
        if not gpu:
            steps = f"{request.denoise} step{'s'[: request.denoise != 1]}"
            show(f"no GPU: computed on the CPU in {model.dtype_on_cpu}, {steps} for the drift")
        for number, found in enumerate(answers_of(WORKER, Answer, requests, show), start=1):
            answers.append(found)
            spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in found.seconds.items())
            show(f"process {number} of {len(requests)}: {spent}")
        first = answers[0]
        seen = watcher.finish() if watcher else None
    if isinstance(seen, str):
        show(f"the GPU was not watched: {seen}")
    after = gpu_state.read_state(0) if gpu else None
    machine = provenance.host()
    return StepRecord(
        run_id=run_id,
        utc=utc,
        seconds=round(time.monotonic() - begun, 1),
        command=plan.command,
        model=plan.model,
        release=plan.release,
        arm=plan.arm,
        sizes=request.sizes,
        tiny=not gpu,
        layers=sum(layers.values()),
        layers_of_model=model.layers,
        parameters=first.parameters,
        seed=plan.seed,
        commit=git.commit,
        dirty=git.dirty,
        hashes=hashes(tasks, first.calls, model, plan.release),
        wheel=f"{pin.package} {pin.version} {pin.wheel_sha256}",
        files=hashlib.sha256((folder / pin.files).read_bytes()).hexdigest(),
        versions=provenance.versions(before.driver if before else None) | _needed_versions(),
        machine=machine.model_copy(update={"kind": "cuda" if gpu else "cpu", "before": before, "after": after}),
        standins=first.standins,
        placeholders=first.placeholders,
        mounted=first.mounted,
        calls=first.calls,
        fallbacks=first.fallbacks,
        difference=first.difference,
        drift=first.drift,
        modes={mode: join_parts([one.timed[mode] for one in answers]) for mode in request.modes},
        profile=first.profile,
        peak_bytes=first.peak_bytes,
        noisy=tuple(gpu_state.noise(before, after)) if before and after else (),
        machine_watch=None if isinstance(seen, str) else seen,
    )


def _needed_versions() -> dict[str, str]:
    """Versions of the packages that SGLang's model modules import."""
    from kda_tools.models.boot import NEEDED

    found = {}
    for name in (*NEEDED, *(["flashinfer-python"] if find_spec("flashinfer") else [])):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a folder on the path says no version
            found[name] = "unknown"
    return found


def join_parts(parts: Sequence[Timed]) -> Mode:
    """One mode of all processes, with its intervals; refused where any of them was."""
    for part in parts:
        if part.refused is not None:
            return Mode(refused=part.refused)
    upstream, subject, again = (
        tuple(part.samples[name] for part in parts) for name in ("upstream", "subject", "again")
    )
    return Mode(
        upstream=upstream,
        subject=subject,
        again=again,
        speedup=stats.speedup(upstream, subject),
        noise=stats.speedup(upstream, again),
    )


def find_calls(name: str, release: str, known: KnownModels, folder: Path) -> list[Answer]:
    """The calls of a step of the whole model, for each of its production requests; nothing is computed.

    Raises:
        UsageError: an unknown model or release.
        UpstreamError: the wheel is not what its pin says, or the class does not import.
    """
    from kda_tools.models.boot import obtain

    model, pin = known.model(name), known.pin(name, release)
    tree = obtain(pin, folder / pin.files, offline=False)

    def asked(sizes: Sizes, census: Census) -> Answer:
        named: dict[str, Any] = {"model": name, "release": release, "tree": str(tree), "arm": "upstream"}
        return ask_worker(Request(sizes=sizes, layers={}, census=census, **named, **NOT_COMPUTED))

    found = []
    for sizes in (model.sizes, *model.more):
        try:
            found.append(asked(sizes, Census.AS_ON_GPU))
        except (ArmFailed, MissingRequirement):  # a kernel outside of the tasks was launched and found no memory
            found.append(asked(sizes, Census.AS_ON_CPU))
    return found


def find_flow(name: str, release: str, layers: int | None, known: KnownModels, folder: Path, command: str) -> StepFlow:
    """The bytes that a step with `layers` layers (None: all) has to move if fused as far as its dataflow allows.

    Raises:
        UsageError: an unknown model or release.
        UpstreamError: the wheel is not what its pin says, or the class does not import.
    """
    from kda_tools.models.boot import obtain

    model, pin = known.model(name), known.pin(name, release)
    shortened = model.shortened(layers or 0)
    named: dict[str, Any] = {"model": name, "release": release, "arm": "upstream", "flow": True}
    tree = str(obtain(pin, folder / pin.files, offline=False))
    git, run_id, utc = provenance.git_state(checkout_root()), provenance.run_id(), provenance.utc()
    found = ask_worker(Request(tree=tree, sizes=model.sizes, layers=shortened, **named, **NOT_COMPUTED))
    return StepFlow(
        run_id=run_id,
        utc=utc,
        command=command,
        model=name,
        release=release,
        sizes=model.sizes,
        layers=sum(shortened.values()),
        layers_of_model=model.layers,
        commit=git.commit,
        dirty=git.dirty,
        kernels=found.flow,
    )


def ask_worker(request: Request) -> Answer:
    """The answer of one worker in a fresh process. Raises what `answers_of` does."""
    # GPUs are hidden, so that every machine gives the same answer.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if request.census or request.flow else None
    (found,) = answers_of(WORKER, Answer, [request], env=hidden)
    return found


def hashes(tasks: Sequence[Task], calls: Sequence[Call], model: Model | None, release: str) -> dict[str, str]:
    """sha256 of what decides a run: the solutions that were called, `DECIDING`, and what is known of the model."""
    used = functools.partial(_is_used, modules=model.modules if model else (), release=release)
    return solution_hashes(tasks, calls, used) | {"models": deciding_hash(DECIDING, model)}


def deciding_hash(files: Sequence[str], model: Strict | None) -> str:
    """sha256 of files of the tools and of a model's entry; None: no model of that name is known any more."""
    room = provenance.content_hash(Path(kda_tools.__file__).parent, files)
    entry = model.model_dump_json(exclude_unset=True) if model else ""
    return hashlib.sha256(f"{room} {entry}".encode()).hexdigest()


def solution_hashes(
    tasks: Sequence[Task], calls: Sequence[Call], used: Callable[[Site], bool] = lambda _: False
) -> dict[str, str]:
    """Task folder -> sha256 of what decides its calls, for every task in `calls`.

    That is its solution, the parts of kda_runtime that this imports, and what puts its ops into classes and functions
    of the model: those of which `used` is true.
    """
    called = {call.task for call in calls}
    found = {}
    for task in tasks:
        if task.folder in called:
            parts = staleness.hashes(task)
            sites = _site_hashes([site for site in sites_of(task) if used(site)])
            text = " ".join((parts["solution"], parts.get("library", ""), *sites))
            found[task.folder] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _is_used(site: Site, modules: Collection[str], release: str) -> bool:
    """Whether a step of a model with these modules may reach the site. Any model may call a function."""
    return site.release == release and (bool(site.function) or site.module in modules)


def _site_hashes(sites: Sequence[Site]) -> list[str]:
    """sha256 of these places in models, and of the modules that put ops there; nothing without a place."""
    if not sites:
        return []
    ways = {WAYS[site.kind] for site in sites}
    if deferred_layouts in ways:  # it stands on the way for lines
        ways.add(deferred_lines)
    names = sorted(Path(str(way.__file__)).name for way in ways)
    text = "\n".join(site.model_dump_json() for site in sites)
    return [hashlib.sha256(text.encode()).hexdigest(), provenance.content_hash(Path(__file__).parent, names)]


DECIDING = (
    *(f"models/{name}.py" for name in ("boot", "builders", "calls", "drift", "fitting", "interleaved", "kernels")),
    *(f"models/{name}.py" for name in ("natives", "seams", "standins", "stepping", "timing", "worker")),
    *("models/worker_process.py", "traces/kernel_classes.py"),
)
"""Files of the tools that can change a number of any model; `solution_hashes` adds those of the called tasks."""


@contextmanager
def _exports(tasks: Sequence[Task]) -> Iterator[dict[str, str]]:
    """Plain exports of the tasks' solutions for as long as the run lasts."""
    from kda_tools.project.export.write import write_arm

    with tempfile.TemporaryDirectory(prefix="kda-exports-") as folder:
        yield {task.folder: str(write_arm(task, Path(folder) / f"portable_{task.op}")) for task in tasks}
