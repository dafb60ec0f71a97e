"""How far the arms' latents drift apart over the steps of a denoising."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from kda_tools.models.step_record import BOUND, Curve, Drift

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""Latent and time from 1 (noise) to 0 -> the model's output, of the latent's shape."""


def trajectory(velocity: Velocity, start: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The latents after each step of Euler's method on flow matching: x <- x - v(x, t) / steps, t from 1 down.

    The latent is held in float32 and rounded to its dtype for the model, as samplers do. Latents are kept on the CPU.
    """
    latent, found = start.float(), []
    for index in range(steps):
        latent = latent - velocity(latent.to(start.dtype), 1 - index / steps).float() / steps
        found.append(latent.cpu())
    return found


def relative(found: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Norm of the difference over the reference's norm; None if that is not finite."""
    value = float((found.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-300))
    return value if math.isfinite(value) else None


def psnr(found: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Peak signal to noise in dB, 20 log10(range / RMS of the difference); None for equal or not finite latents."""
    spread = float(reference.double().max() - reference.double().min())
    error = float((found.double() - reference.double()).square().mean().sqrt())
    return 20 * math.log10(spread / error) if 0 < error < math.inf and 0 < spread < math.inf else None


def curve(found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> Curve:
    """Both measures after each step."""
    pairs = list(zip(found, reference, strict=True))
    return Curve(
        relative=tuple(relative(a, b) for a, b in pairs),
        psnr_db=tuple(psnr(a, b) for a, b in pairs),
    )


def drift(latents: Mapping[str, Sequence[torch.Tensor]]) -> Drift:
    """The curves of the arms `solution`, `upstream`, `eager`, `plain` and `rounded`, and the bound at the last step."""
    ours = curve(latents["solution"], latents["eager"])
    theirs = curve(latents["upstream"], latents["eager"])
    rounding = curve(latents["rounded"], latents["plain"])
    ratio, within = judge(ours.relative[-1], theirs.relative[-1], rounding.relative[-1])
    return Drift(
        steps=len(latents["eager"]),
        solution_upstream=curve(latents["solution"], latents["upstream"]),
        upstream_eager=theirs,
        solution_eager=ours,
        rounding=rounding,
        ratio=ratio,
        within=within,
    )


def judge(ours: float | None, upstream: float | None, rounding: float | None) -> tuple[float | None, bool]:
    """Ours over the larger of the other two, and whether that is within `BOUND`; what is not finite is not."""
    if ours is None or upstream is None or rounding is None:
        return None, False
    allowed = max(upstream, rounding)
    return (ours / allowed, ours <= BOUND * allowed) if allowed else (None, ours == 0)
