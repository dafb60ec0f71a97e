"""Compile a task's kernels ahead of time, on any machine, and report what they use.

A task takes part by exporting one function from its solution package:

    launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, ...]) -> list of Compilable

It returns what a call of `op` with these inputs would launch, and nothing where the call takes the plain PyTorch path.
The inputs are meta tensors (no memory, no device), None left out. `kda_core.launch.Launch` is Compilable; so is
any object with its `name`, `variant` and `compile(target)`, which is how CuTe DSL kernels join.
Nothing here is a measurement: compile time is the compiler's, not the kernel's.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kda_core.errors import MissingRequirement, UsageError

if TYPE_CHECKING:
    from kda_core.launch import Binary
    from kda_core.workloads import Workload


class Compilable(Protocol):
    """One kernel launch as the solution would make it."""

    @property
    def name(self) -> str:
        """The kernel's function name."""

    @property
    def variant(self) -> str:
        """What tells this compilation from others of the kernel; equal variants are compiled once."""

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""


@dataclass(frozen=True)
class CompiledKernel:
    """What one variant of a kernel uses on one target."""

    name: str
    variant: str
    target: str
    rows: tuple[str, ...]
    """Workload ids that launch it."""
    registers: int
    """Per thread."""
    shared_bytes: int
    """Per block, static and dynamic."""
    spill_bytes: int
    """Local memory per thread, which is where spilled registers go."""
    seconds: float
    """Wall time of the compilation, or of finding it in the compiler's cache."""


def compile_task(task_package: str, workloads: Iterable[Workload], targets: Sequence[str]) -> list[CompiledKernel]:
    """Compile what the solution of `task_package` launches for these rows, once per variant and target.

    Raises UsageError when the solution has no `launches` hook, MissingRequirement when kernels cannot be compiled here.
    """
    solution = importlib.import_module(f"{task_package}.solution")
    hook = getattr(solution, "launches", None)
    if hook is None:
        raise UsageError(f"{task_package}.solution: expected a function launches(op, inputs, scalars), found none")
    if _interpreting():
        raise MissingRequirement("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    found: dict[tuple[str, str], tuple[Compilable, list[str]]] = {}
    for row in workloads:
        for launch in hook(row.op, meta_tensors(row), row.scalars):
            found.setdefault((launch.name, launch.variant), (launch, []))[1].append(row.id)
    return [_compile(launch, target, tuple(rows)) for target in targets for launch, rows in found.values()]


def meta_tensors(row: Workload) -> dict[str, Any]:
    """The row's inputs without memory: shapes, dtypes and strides only."""
    import torch

    return {
        name: torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in row.inputs.items()
    }


def _compile(launch: Compilable, target: str, rows: tuple[str, ...]) -> CompiledKernel:
    start = time.perf_counter()
    binary = launch.compile(target)
    seconds = time.perf_counter() - start
    registers, static_shared, local = resources(binary.cubin)
    return CompiledKernel(
        name=launch.name,
        variant=launch.variant,
        target=target,
        rows=rows,
        registers=registers,
        shared_bytes=static_shared + binary.dynamic_shared_bytes,
        spill_bytes=local,
        seconds=seconds,
    )


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, static shared bytes per block and local bytes per thread of a one-kernel cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=False)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    if used is None:
        raise MissingRequirement(f"cuobjdump cannot read the cubin: {(done.stderr or done.stdout).strip()}")
    registers, stack, shared, local = map(int, used.groups())
    return registers, shared, stack + local


def _cuobjdump() -> str:
    from triton import knobs

    path = Path(knobs.nvidia.cuobjdump.path)
    if not path.is_file():
        raise MissingRequirement(f"cuobjdump, which triton brings, is missing: {path}; reinstall triton")
    return str(path)


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
