"""Run one model in this process: a step, and a denoising, each with the arm that is in place."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kda_judge.contract.errors import MissingRequirement
from kda_tools.models import boot
from kda_tools.models.builders import Built
from kda_tools.models.drift import trajectory

MIDDLE = 0.5
"""The time, from 1 (noise) to 0, that the inputs' timesteps stand for."""
GIB = 2**30


class Stepper:
    """A built model whose step can be taken again and again."""

    def __init__(self, built: Built, device: torch.device, dtype: torch.dtype, autocast: bool) -> None:
        self.built, self.device, self._dtype, self._autocast = built, device, dtype, autocast
        self._forward = importlib.import_module(f"{boot.RUNTIME}managers.forward_context")
        self.call: Callable[..., Any] = built.module

    def step(self, **changed: Any) -> torch.Tensor:
        """Run one step, with `changed` inputs; returns the model's output, or the first of several."""
        with self._around():
            output = self.call(**{**self.built.inputs, **changed})
        found: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
        return found

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(
                self._forward.set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=None)
            )
            stack.enter_context(torch.autocast(self.device.type, dtype=self._dtype, enabled=self._autocast))
            if self.device.type == "cuda":  # the nearest to FlashAttention 3, which is compiled into sgl_kernel
                order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                stack.enter_context(sdpa_kernel([*order, SDPBackend.MATH], set_priority=True))
            yield

    def denoise(self, steps: int) -> list[torch.Tensor]:
        """The latent after each of `steps` steps with the arm that is in place; see `drift.trajectory`."""
        inputs, moving = self.built.inputs, self.built.moving
        whole = inputs["hidden_states"]

        def velocity(latent: torch.Tensor, time: float) -> torch.Tensor:
            times = {name: inputs[name] * (time / MIDDLE) for name in ("timestep", "audio_timestep") if name in inputs}
            output = self.step(hidden_states=torch.cat([latent, whole[:, moving:]], dim=1), **times)
            if output.ndim == whole.ndim + 2:  # tokens in, a grid out
                output = output.flatten(2).transpose(1, 2)
            return output[:, :moving]

        return trajectory(velocity, whole[:, :moving], steps)


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes, on the GPU or, without one, of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    known = dict(line.split(":") for line in lines)
    return int(known["MemAvailable"].split()[0]) * 1024


def check_memory(name: str, layers: int, needed: int, free: int) -> None:
    """Refuse a model whose weights alone do not fit.

    Raises:
        MissingRequirement: says what is needed and what is free.
    """
    if needed > free:
        raise MissingRequirement(
            f"{name} with {layers} layers: its weights alone need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are "
            "free; ask for fewer with --layers"
        )
