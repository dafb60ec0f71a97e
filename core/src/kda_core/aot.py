"""Compile a task's kernels ahead of time, on any machine, and report what they use.

A task takes part by exporting one function from its solution package:

    launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, ...]) -> list of Compilable

It returns what a call of `op` with these inputs would launch, and nothing where the call takes the plain PyTorch path.
A solution in plain PyTorch needs no hook; one with kernels that lacks it is an error, here and in `kda validate`.
The inputs are meta tensors (no memory, no device), None left out. `kda_core.launch.Launch` is Compilable; so is
any object with its `name`, `variant` and `compile(target)`, which is how CuTe DSL kernels join.
Nothing here is a measurement: compile time is the compiler's, not the kernel's.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kda_core import sass, sources
from kda_core.errors import MissingRequirement, UsageError
from kda_core.occupancy import Occupancy, multiprocessor, occupancy

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
    threads: int | None
    """Per block, where they were fixed when it was compiled."""
    code: sass.Code

    @property
    def occupancy(self) -> Occupancy | None:
        """What a multiprocessor of the target holds of it; None where that GPU or the threads are not known."""
        sm = multiprocessor(self.target)
        if sm is None or self.threads is None:
            return None
        return occupancy(sm, self.threads, self.registers, self.shared_bytes)

    @property
    def in_flight(self) -> int | None:
        """Bytes that the global loads of all resident threads have on the way at most; an estimate, see `sass.Code`."""
        held = self.occupancy
        if held is None or self.threads is None or self.code.in_flight is None:
            return None
        return held.blocks * self.threads * self.code.in_flight


def compile_task(
    task_package: str, workloads: Iterable[Workload], targets: Sequence[str]
) -> list[CompiledKernel] | None:
    """Compile what the solution of `task_package` launches for these rows, once per variant and target.

    None for a solution that has no hook and imports nothing that kernels are written with.

    Raises UsageError when a solution with kernels has no hook, MissingRequirement when they cannot be compiled here.
    """
    solution = importlib.import_module(f"{task_package}.solution")
    hook = getattr(solution, sources.HOOK, None)
    if hook is None:
        path = Path(str(solution.__file__))
        if sources.has_kernels(path.parent):
            raise UsageError(f"{path}: {sources.without_hook()}")
        return None
    if _interpreting():
        raise MissingRequirement("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    found: dict[tuple[str, str], tuple[Compilable, dict[str, None]]] = {}
    for row in workloads:
        for launch in hook(row.op, meta_tensors(row), row.scalars):
            found.setdefault((launch.name, launch.variant), (launch, {}))[1][row.id] = None
    # Compilers are asked one after the other; meanwhile processes of their own look into what was made.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = [_compile(launch, target, tuple(rows), pool) for target in targets for launch, rows in found.values()]
        return [described() for described in made]


def meta_tensors(row: Workload) -> dict[str, Any]:
    """The row's inputs without memory: shapes, dtypes and strides only."""
    import torch

    return {
        name: torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in row.inputs.items()
    }


def _compile(
    launch: Compilable, target: str, rows: tuple[str, ...], pool: ThreadPoolExecutor
) -> Callable[[], CompiledKernel]:
    start = time.perf_counter()
    binary = launch.compile(target)
    seconds = time.perf_counter() - start
    looked_into = pool.submit(sass.contents, binary.cubin)

    def described() -> CompiledKernel:
        found = looked_into.result()
        return CompiledKernel(
            name=launch.name,
            variant=launch.variant,
            target=target,
            rows=rows,
            registers=found.registers,
            shared_bytes=found.shared_bytes + binary.dynamic_shared_bytes,
            spill_bytes=found.local_bytes,
            seconds=seconds,
            threads=found.threads,
            code=found.code,
        )

    return described


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, static shared bytes per block and local bytes per thread of a one-kernel cubin."""
    return sass.used(cubin, sass.dump(cubin, "-res-usage"))


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
