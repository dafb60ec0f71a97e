"""Compile a task's kernels ahead of time, on any machine, and report what they use.

A task takes part by exporting one function from its solution package:

    launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, ...]) -> list of Compilable

It returns what a call of `op` with these inputs would launch; an empty list if the call takes the plain PyTorch path.
A solution in plain PyTorch needs no hook; one with kernels that lacks it is an error, here and in `kda validate`.
The inputs are meta tensors (no memory, no device), None left out. `kda_runtime.launch.Launch` is Compilable; so is
any object with its `name`, `variant` and `compile(target)`, which is how kernels in the CuTe DSL and in CUDA C++ join.
Nothing here is a measurement: compile time is the compiler's, not the kernel's.
"""

from __future__ import annotations

import os
import re
import reprlib
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kda_judge.contract import solution_imports
from kda_judge.contract.errors import ArmFailed, KdaError, MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_tools.lab.inspect import sass
from kda_tools.lab.inspect.occupancy import Occupancy, multiprocessor, occupancy
from kda_tools.lab.task_calls import call_checked

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from kda_judge.contract.tasks import Task
    from kda_judge.contract.workloads import Workload
    from kda_runtime.launch import Binary


SUBJECT = "solution"
"""The arm whose kernels are compiled when none is named, and its module."""


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
    """Per block; None if they were not fixed when it was compiled."""
    code: sass.Code

    @property
    def occupancy(self) -> Occupancy | None:
        """How many blocks a multiprocessor of the target holds; None if that GPU or the threads are not known."""
        sm = multiprocessor(self.target)
        if sm is None or self.threads is None:
            return None
        return occupancy(sm, self.threads, self.registers, self.shared_bytes)

    @property
    def in_flight(self) -> int | None:
        """Most bytes that the global loads of all resident threads have on the way; an estimate, see `sass.Code`."""
        held = self.occupancy
        if held is None or self.threads is None or self.code.in_flight is None:
            return None
        return held.blocks * self.threads * self.code.in_flight


def compile_task(
    task: Task, workloads: Iterable[Workload], targets: Sequence[str], arm: str = SUBJECT
) -> list[CompiledKernel] | None:
    """Compile what an arm of the task launches for these rows, once per variant and target.

    None for an arm that has no hook and no kernels.

    Raises:
        UsageError: there is no such arm or target, or an arm with kernels has no hook.
        MissingRequirement: the kernels cannot be compiled here.
        ArmFailed: the hook returns something else than launches, or a kernel does not compile.
    """
    if arm != SUBJECT and arm not in task.config.arms:
        raise UsageError(f"--arm {arm}: expected {' or '.join(task.config.arms)}")
    solution = task.load(SUBJECT if arm == SUBJECT else task.config.arms[arm].module)
    hook = getattr(solution, solution_imports.HOOK, None)
    if hook is None:
        path = Path(str(solution.__file__))
        if solution_imports.has_kernels(path.parent):
            raise UsageError(f"{path}: {solution_imports.without_hook()}")
        return None
    if _interpreting():
        raise MissingRequirement("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    check_targets(task, targets)
    found: dict[tuple[str, str], tuple[Compilable, dict[str, None]]] = {}
    for row in workloads:
        if arm != SUBJECT and not hasattr(solution, row.op):  # an arm of the lab may have some of the ops
            continue
        for launch in launches_of_row(solution, row, meta_tensors(row)):
            found.setdefault((launch.name, launch.variant), (launch, {}))[1][row.id] = None
    # Compilers run one after the other; meanwhile other processes read the code that was made.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = [_compile(launch, target, tuple(rows), pool) for target in targets for launch, rows in found.values()]
        return [described() for described in made]


def launches_of_row(solution: ModuleType, row: Workload, inputs: Mapping[str, torch.Tensor]) -> tuple[Compilable, ...]:
    """What a call on a row would launch, as the hook of a solution says.

    Raises:
        ArmFailed: what it returns are no launches.
    """
    made = call_checked(solution, solution_imports.HOOK, row.op, inputs, row.scalars, error=ArmFailed)
    launches = tuple(made) if isinstance(made, Iterable) and not isinstance(made, (str, bytes)) else None
    wrong = [one for one in launches if not _is_compilable(one)] if launches is not None else [made]
    if launches is None or wrong:
        where = f"{solution.__file__}: {solution_imports.HOOK}({row.op!r}, ...), row {row.id!r}"
        raise ArmFailed(
            f"{where}: expected a list of launches, objects with `name`, `variant` and `compile(target)`, got "
            f"{reprlib.repr(wrong[0])}"
        )
    return launches


def _is_compilable(one: object) -> bool:
    texts = (getattr(one, "name", None), getattr(one, "variant", None))
    return all(isinstance(text, str) for text in texts) and callable(getattr(one, "compile", None))


def check_targets(task: Task, targets: Iterable[str]) -> None:
    """Refuse a target that Triton's assembler does not know; for some of these LLVM would end the process.

    Raises:
        UsageError: names the target, and those with the nearest names.
    """
    from triton import knobs

    tools = [tool for name in ("ptxas", "ptxas_blackwell") if (tool := getattr(knobs.nvidia, name, None))]
    helps = [subprocess.run([tool.path, "--help"], capture_output=True, text=True, check=True).stdout for tool in tools]
    known = sorted({target for text in helps for target in re.findall(r"'(sm_\w+)'", text)})
    for target in targets:
        if target not in known:
            raise UsageError(
                f"{task.path / 'config.toml'}: key 'capability' of a target: expected one that the compilers here "
                f"know, nearest {', '.join(nearest(target, known))}, got {target!r}"
            )


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
    what = f"{launch.name} for {target}"
    try:
        binary = launch.compile(target)
    except (KdaError, ImportError):
        raise
    except Exception as error:
        raise ArmFailed(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(binary, "cubin", None), bytes):
        raise ArmFailed(f"{what}: expected `compile` to return a Binary, got {reprlib.repr(binary)}")
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
    return sass.resource_usage(cubin, sass.dump(cubin, "-res-usage"))


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
