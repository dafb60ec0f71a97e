"""Import an arm in a process of its own, and find its callables."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kda_judge.arms.protocol import ArmSpec
from kda_judge.contract.task_import import import_from

REPLAYER = "sglang/kernels/ops/diffusion/common/fast_launch.py"
"""Upstream's file with the launcher that repeats the launches of a Triton function, in releases that have it."""


def import_arm(arm: ArmSpec) -> ModuleType:
    """Import the arm's module, after what it needs: the interpreter's conversions, its pinned upstream files."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does

        convert_as_a_gpu_does()
    if arm.device.startswith("cuda"):
        torch.cuda.set_device(arm.device)
    if arm.upstream_root is not None:
        from kda_judge.arms.upstream import activate

        activate(Path(arm.upstream_root), str(arm.upstream_version), arm.upstream_module)
    return import_from(Path(arm.folder), arm.module)


def callable_of(module: ModuleType, arm: ArmSpec, op: str) -> Callable[..., Any]:
    """The arm's public callable for an op, wrapped as the arm says; an AttributeError where there is none."""
    import torch

    found: Callable[..., Any] | None = getattr(module, op, None)
    if not callable(found):
        raise AttributeError(f"arm {arm.name!r} ({arm.module}) has no callable {op!r}")
    if arm.replayed:
        return replay_launches()(found)  # type: ignore[no-any-return]
    if arm.compiled:
        torch.compiler.reset()  # past the recompile limit Dynamo would silently run eagerly
        found = torch.compile(found)
    return found


def tensors_first(function: Callable[..., Any], names: Sequence[str], by_name: bool) -> Callable[..., Any]:
    """`function`, or where tensors are passed `by_name` a function that takes them in the order of `names`."""
    if not by_name:
        return function

    def call(*tensors: Any, **scalars: Any) -> Any:
        return function(**dict(zip(names, tensors, strict=True)), **scalars)

    return call


def replay_launches() -> Callable[..., Any]:
    """Upstream's own decorator of functions that launch Triton kernels: it repeats their launches without Triton."""
    from importlib import import_module

    decorator: Callable[..., Any] = import_module(REPLAYER.removesuffix(".py").replace("/", ".")).replay_launches
    return decorator
