"""Times of a step on a GPU: two arms and upstream once more, interleaved in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from kda_judge.arms.clocks import capturing
from kda_tools.models.protocol import Timed
from kda_tools.models.seams import Seams
from kda_tools.models.stepping import Stepper

SAMPLE_S = 0.1
"""Steps are added until one sample lasts this long, up to `MOST_STEPS`."""
MOST_STEPS = 10
WARM_UP = 2
MODES = ("eager", "graph", "compile")


def timed(mode: str, stepper: Stepper, seams: Seams, subject: str, samples: int, seed: int) -> Timed:
    """Samples of one mode; a reason where the class, or an arm, does not run that way."""
    try:
        upstream = _runner(mode, stepper, seams, "upstream")
        runners = {"upstream": upstream, "subject": _runner(mode, stepper, seams, subject), "again": upstream}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever capturing or compiling raises is the answer
        torch.cuda.synchronize()
        return Timed(refused=f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        stepper.call = stepper.built.module
    for _ in range(WARM_UP):
        for run in runners.values():
            run(1)
    steps = max(1, min(MOST_STEPS, round(SAMPLE_S / max(_clock(runners["upstream"], 1), 1e-6))))
    order, shuffle = list(runners), random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(samples):
        shuffle.shuffle(order)
        for name in order:
            found[name].append(_clock(runners[name], steps) * 1e6 / steps)
    return Timed(samples={name: tuple(values) for name, values in found.items()})


def _runner(mode: str, stepper: Stepper, seams: Seams, arm: str) -> Callable[[int], None]:
    """A function that takes so many steps with this arm."""
    seams.use(arm)
    if mode == "graph":
        replay = _captured(stepper)

        def replayed(steps: int) -> None:
            for _ in range(steps):
                replay()

        return replayed
    call = torch.compile(stepper.built.module) if mode == "compile" else stepper.built.module
    stepper.call = call
    stepper.step()

    def stepped(steps: int) -> None:
        seams.use(arm)
        stepper.call = call
        for _ in range(steps):
            stepper.step()

    return stepped


def _captured(stepper: Stepper) -> Callable[[], Any]:
    """Replay of a CUDA graph of one step."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            stepper.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        stepper.step()
    return graph.replay


def _clock(run: Callable[[int], None], steps: int) -> float:
    """Seconds of so many steps, from an idle GPU to an idle GPU; the arm is put in place before the clock starts."""
    run(0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - begun
