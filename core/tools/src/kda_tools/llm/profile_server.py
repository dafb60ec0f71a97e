"""Run `kda llm profile`: make a loaded server write a trace, but only in a steady state.

A server is steady if every reading of its metrics shows about the same number of requests at work and none waiting.
Before that, a trace would show a queue that fills, or only prompts. Another program makes the load, for example
`kda llm bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kda_judge.contract.errors import ArmFailed, MissingRequirement, UsageError
from kda_tools.llm import server_client
from kda_tools.llm.known_llms import Engine

READINGS = 6
"""Number of successive readings that have to agree."""
SPREAD = 0.1
"""Largest difference of the readings, as a part of the largest one; a difference of 1 is always allowed."""
STOP_S = 600.0
"""Seconds for vLLM to write its trace, as it answers only after that; also for a trace to stop growing."""
SETTLED_S = 1.0
"""Seconds: a trace whose size does not change for this long is complete."""


@dataclass(frozen=True)
class ProfilePlan:
    """What the user asked for."""

    url: str
    engine: Literal["sglang", "vllm"]
    folder: Path
    """Where the server writes; for vLLM the folder that it was started with."""
    steps: int
    """Number of steps to profile, for SGLang."""
    seconds: float
    """Seconds to profile, for vLLM, which counts no steps."""
    shapes: bool
    """Whether to record operators and shapes, which slows the host down; if not, only the GPU, enough for shares."""
    wait_s: float
    """Seconds to wait for a steady state, and again for the trace."""
    every_s: float = 0.5
    """Seconds between two readings."""


def run(plan: ProfilePlan, engine: Engine, report: Callable[[str], None]) -> list[Path]:
    """Wait for a steady state, profile, and give the new traces back.

    Raises:
        MissingRequirement: no server, no metrics, no profiler in it, or no trace came.
        UsageError: no steady state within the time.
        ArmFailed: the load changed while the profiler ran; the traces are kept.
    """
    if engine.running is None or engine.waiting is None:
        raise UsageError(f"--engine {plan.engine}: expected one with a profiler")
    running = _steady(plan, engine)
    plan.folder.mkdir(parents=True, exist_ok=True)
    before = set(traces(plan.folder))
    report(f"steady: {running:g} requests at work; profiling")
    if plan.engine == "sglang":
        body = {
            "output_dir": str(plan.folder.absolute()),
            "num_steps": plan.steps,
            "activities": ["CPU", "GPU"] if plan.shapes else ["GPU"],
            "record_shapes": plan.shapes,
            "with_stack": plan.shapes,
        }
        server_client.ask(plan.url, "/start_profile", body)
    else:
        server_client.ask(plan.url, "/start_profile", {})
        time.sleep(plan.seconds)
    seen = [_reading(plan, engine)[0]]
    if plan.engine == "vllm":
        server_client.ask(plan.url, "/stop_profile", {}, STOP_S)
    found: list[Path] = []

    def written() -> bool:
        found[:] = sorted(set(traces(plan.folder)) - before)
        if not found and plan.engine == "sglang":  # SGLang answers before it profiles, and stops by itself
            seen.append(_reading(plan, engine)[0])
        return bool(found)

    if not server_client.wait_until(written, plan.wait_s, plan.every_s):
        raise MissingRequirement(
            f"{plan.folder}: expected a trace within {plan.wait_s:g} s, got none; the server writes on its own "
            "machine: into this folder (SGLang), or the one of its --profiler-config (vLLM)"
        )
    _settle(found)
    written()
    after = max(seen, key=lambda one: abs(one - running))
    if abs(after - running) > max(1.0, SPREAD * running):
        raise ArmFailed(
            f"the load changed while the profiler ran, from {running:g} to {after:g} requests at work: "
            f"{', '.join(path.name for path in found)} in {plan.folder} are of no steady state; load for longer"
        )
    return found


def traces(folder: Path) -> list[Path]:
    """The traces in a folder."""
    return [path for pattern in ("*.json", "*.json.gz") for path in folder.rglob(pattern)]


def _steady(plan: ProfilePlan, engine: Engine) -> float:
    readings: list[tuple[float, float]] = []

    def agree() -> bool:
        readings.append(_reading(plan, engine))
        last = readings[-READINGS:]
        most = max(running for running, _ in last)
        least = min(running for running, _ in last)
        calm = most > 0 and most - least <= max(1.0, SPREAD * most) and least > 0
        return len(last) == READINGS and calm and not any(waiting for _, waiting in last)

    if not server_client.wait_until(agree, plan.wait_s, plan.every_s):
        loads = ", ".join(f"{running:g}+{waiting:g}" for running, waiting in readings[-READINGS:])
        raise UsageError(
            f"{plan.url}: expected a steady load within {plan.wait_s:g} s, got at last (at work + waiting) {loads}; "
            "load it meanwhile, for example with `kda llm bench`, for longer, or with fewer requests at once"
        )
    return readings[-1][0]


def _reading(plan: ProfilePlan, engine: Engine) -> tuple[float, float]:
    """Requests at work, and requests that wait."""
    assert engine.running is not None
    assert engine.waiting is not None
    found = server_client.gauges(plan.url, (engine.running, engine.waiting))
    if len(found) < len((engine.running, engine.waiting)):
        raise MissingRequirement(
            f"{plan.url}/metrics: expected {engine.running} and {engine.waiting} of {plan.engine}, got a page without "
            "them; is it that engine? SGLang is to be started with --enable-metrics"
        )
    return found[engine.running], found[engine.waiting]


def _settle(found: list[Path]) -> None:
    """Wait until the traces grow no more."""
    sizes: list[int] = []

    def still() -> bool:
        now = [path.stat().st_size for path in found]
        same = now == sizes
        sizes[:] = now
        return same

    server_client.wait_until(still, STOP_S, SETTLED_S)
