"""Time a step on a GPU in one process: upstream, the subject and upstream again, interleaved."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from kda_judge.arms.clocks import aside, capturing
from kda_tools.models.protocol import Timed

SAMPLE_S = 0.1
"""Seconds that one sample should last; it takes as many steps as that needs, at most `MOST_STEPS`."""
MOST_STEPS = 10
WARM_UP = 2


def interleaved(runner: Callable[[str], Callable[[int], None]], subject: str, samples: int, seed: int) -> Timed:
    """Samples of upstream, the subject and upstream again, in a new order for each.

    `runner(arm)` returns a function that does a given number of steps. If it raises, the mode is refused.
    """
    try:
        upstream = runner("upstream")
        runners = {"upstream": upstream, "subject": runner(subject), "again": upstream}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # any error of capturing or compiling is the reason
        torch.cuda.synchronize()
        return Timed(refused=f"{type(error).__name__}: {str(error)[:300]}")
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


def replayed(step: Callable[[], Any]) -> Callable[[int], None]:
    """A function that does so many steps by a CUDA graph of one."""
    with aside():
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        step()

    def replay(steps: int) -> None:
        for _ in range(steps):
            graph.replay()

    return replay


def _clock(run: Callable[[int], None], steps: int) -> float:
    """Seconds for `steps` steps, from idle GPU to idle GPU; `run(0)` selects the arm before the clock starts."""
    run(0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - begun
