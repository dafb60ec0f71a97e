"""Times of a model's step in each mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kda_tools.models.interleaved import interleaved, replayed
from kda_tools.models.protocol import Timed
from kda_tools.models.seams import Seams
from kda_tools.models.stepping import Stepper

MODES = ("eager", "graph", "compile")


def timed(mode: str, stepper: Stepper, seams: Seams, subject: str, samples: int, seed: int) -> Timed:
    """Samples of one mode, or the reason why the class or an arm does not run in it."""
    try:
        return interleaved(partial(_runner, mode, stepper, seams), subject, samples, seed)
    finally:
        stepper.call = stepper.built.module


def _runner(mode: str, stepper: Stepper, seams: Seams, arm: str) -> Callable[[int], None]:
    """A function that takes so many steps with this arm."""
    seams.use(arm)
    if mode == "graph":
        return replayed(stepper.step)
    call = torch.compile(stepper.built.module) if mode == "compile" else stepper.built.module
    stepper.call = call
    stepper.step()

    def stepped(steps: int) -> None:
        seams.use(arm)
        stepper.call = call
        for _ in range(steps):
            stepper.step()

    return stepped
