"""The worker process of `kda model step`: `python -m kda_tools.models.worker REQUEST ANSWER`, both JSON files.

It first imports what it needs, then waits for a line of input before it uses the GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kda_judge.contract import errors
from kda_judge.contract.tasks import find_tasks
from kda_tools.models import boot, builders, census, drift, known_models, standins
from kda_tools.models.calls import Log, Rows
from kda_tools.models.kernels import middle, profiled, traced
from kda_tools.models.protocol import Answer, Census, Request
from kda_tools.models.seams import ARMS, Seams, solutions_of
from kda_tools.models.step_record import Drift, Profile, Share
from kda_tools.models.stepping import GIB, Stepper, check_memory, free_bytes
from kda_tools.models.timing import timed
from kda_tools.models.worker_process import await_turn, tell, work

PROFILES = 3
"""Number of profiles of a step of each arm; the arms take turns."""
LONG_S = 1.0
"""Seconds. Of a step that takes longer one profile is enough: the GPU's clock changes within it as between steps."""


def answer(request: Request) -> Answer:
    """Do what is asked in this process.

    Raises:
        KdaError: the class does not import, memory is too small, or the model calls a placeholder.
    """
    known = known_models.load_models()
    model = known.model(request.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if request.modes and device.type == "cpu":
        raise errors.MissingRequirement(
            f"there is a GPU, which torch {torch.__version__} cannot use; install a CUDA build"
        )
    replaced = boot.boot(Path(request.tree), request.release)
    # On the CPU never float16: it lacks kernels for some of what models do.
    dtype = getattr(torch, model.dtype if device.type == "cuda" else model.dtype_on_cpu)
    asked = builders.Request(request.sizes, request.release, request.seed, device, dtype)
    tasks = [task for task in find_tasks() if task.family == known_models.FOLDER.parts[0]]
    solutions = solutions_of(tasks, request.exports)
    boot.load(model.class_)
    await_turn()
    seams = Seams(tasks, request.release, solutions, device, exact=request.arm == "exact")
    real = dataclasses.replace(asked, dtype=getattr(torch, model.dtype))
    if request.flow:
        return Answer(flow=census.flow_of(model, real, request.layers, seams))
    if request.census:
        as_on_gpu = request.census is Census.AS_ON_GPU
        return Answer(calls=census.calls_of(model, real, seams, tasks, as_on_gpu), as_on_gpu=as_on_gpu)
    needed = builders.weight_bytes(model, request.layers, asked)
    check_memory(request.model, sum(request.layers.values()), needed, free_bytes(device))
    seconds: dict[str, float] = {}
    with _lasting(seconds, "weights and first step"):
        built = builders.build(model, request.layers, asked)
        seams.attach(built.module)
        stepper = Stepper(built, device, dtype, model.under_autocast(request.release))
        seams.use("upstream")
        stepper.step()
        seams.find_places()
    subject = "upstream" if request.arm == "upstream" else "solution"
    found = Answer(
        parameters=sum(parameter.numel() for parameter in built.module.parameters()),
        standins=replaced,
    )
    if request.check:
        with _lasting(seconds, "calls, outputs and profile"):
            found = _checked(found, stepper, seams, subject, Rows(tasks))
        seams.use("upstream")
        with _lasting(seconds, "drift"):
            drifted = _drift(stepper, seams, request.denoise)
        found = found.model_copy(
            update={
                "placeholders": tuple(sorted(standins.TOUCHED)),
                "mounted": seams.natives.mounted,
                "drift": drifted,
            }
        )
    times = {}
    for mode in request.modes:
        with _lasting(seconds, mode):
            times[mode] = timed(mode, stepper, seams, subject, request.samples, request.seed)
    if request.trace is not None:
        with _lasting(seconds, "trace"):
            seams.use("upstream")
            traced(stepper.step, Path(request.trace))
    return found.model_copy(update={"timed": times, "seconds": seconds})


@contextmanager
def _lasting(seconds: dict[str, float], what: str) -> Iterator[None]:
    tell(what)
    begin = time.perf_counter()
    yield
    seconds[what] = round(time.perf_counter() - begin, 1)


def _checked(found: Answer, stepper: Stepper, seams: Seams, subject: str, rows: Rows) -> Answer:
    """Calls, outputs, peak memory and, on a GPU, the profile of both arms."""
    outputs, peaks, longest = {}, {}, 0.0
    log = Log()
    for arm in ("upstream", "solution", "eager"):
        seams.use(arm, log=log if arm == "solution" else None)
        outputs[arm] = stepper.step().float().cpu()
        if stepper.device.type == "cuda" and arm != "eager":
            seams.use(arm)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            stepper.step()
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - begun)
            peaks[arm] = torch.cuda.max_memory_allocated()
    pairs = (("solution", "upstream"), ("upstream", "eager"), ("solution", "eager"))
    difference = {}
    for first, second in pairs:
        apart = drift.relative(outputs[first], outputs[second])
        if apart is None:
            raise errors.ArmFailed(f"one step: the output of {first} or of {second} is not finite")
        difference[f"{first}-{second}"] = apart
    profile = None
    if stepper.device.type == "cuda":
        shares: tuple[list[Share], list[Share]] = ([], [])
        for _ in range(PROFILES if longest < LONG_S else 1):
            for arm, found_of in zip(("upstream", subject), shares, strict=True):
                seams.use(arm, annotate=True)
                found_of.append(profiled(stepper.step))
        profile = Profile(upstream=middle(shares[0]), subject=middle(shares[1]))
    return found.model_copy(
        update={
            "calls": log.calls(rows),
            "fallbacks": log.fallbacks(),
            "difference": difference,
            "peak_bytes": peaks,
            "profile": profile,
        }
    )


def _drift(stepper: Stepper, seams: Seams, steps: int) -> Drift | None:
    if not steps or not stepper.built.moving:
        return None
    latents: dict[str, list[torch.Tensor]] = {}
    for arm in ARMS:
        if arm == "plain" and stepper.device.type == "cpu":  # the same functions as `upstream` there
            latents[arm] = latents["upstream"]
            continue
        seams.use(arm)
        tell(f"drift, {steps} steps with the arm {arm}")
        latents[arm] = stepper.denoise(steps)
    return drift.drift(latents)


def main() -> None:
    """Answer the request, or say which error there was."""

    def do(request: Request) -> Answer:
        try:
            return answer(request)
        except torch.OutOfMemoryError as error:
            free, layers = free_bytes(torch.device("cuda")) / GIB, sum(request.layers.values())
            text = f"{request.model}: out of memory in a step of {layers} layers, {free:.1f} GiB free: "
            text += f"{str(error).partition('. If reserved')[0]}; ask for fewer with --layers"
            raise errors.MissingRequirement(text) from None

    work(Request, Answer, do)


if __name__ == "__main__":
    main()
