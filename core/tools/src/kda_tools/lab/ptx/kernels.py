"""Turns a solution's Triton launch into a run of the machine: the compiled program, its parameters, its tensors."""

import importlib
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

import kda_runtime.launch
import kda_runtime.op
from kda_judge.contract.tasks import Task
from kda_runtime.launch import ALIGNMENT, Launch
from kda_runtime.op import forget_plans
from kda_tools.lab.ptx.cute import run_cute
from kda_tools.lab.ptx.machine import execute
from kda_tools.lab.ptx.parse import Program, PtxError, parse
from kda_tools.lab.ptx.run import DEFAULT, TARGET, WARP, Ahead, Options, Traffic, pack_params

FORMATS = {4: "I", 8: "Q"}
"""`struct` letters of parameters, by size."""


@dataclass(frozen=True)
class Compiled:
    """A launch as Triton compiled it."""

    program: Program
    names: tuple[str, ...]
    """The kernel's arguments that are parameters, in order; two pointers to scratch memory follow them."""
    shared_bytes: int


_COMPILED: dict[tuple[object, ...], Compiled] = {}


def compiled(launch: Launch, aligned: tuple[bool, ...]) -> Compiled:
    """The program that a launch would load on an H200, compiled once; `aligned` says which tensors are aligned."""
    import triton

    key = (launch.kernel, launch.variant, aligned)
    if key not in _COMPILED:
        kept: list[Any] = []
        real, addresses = triton.compile, iter([0 if fits else 1 for fits in aligned])

        def keep(*args: Any, **kwargs: Any) -> Any:
            kept.append(real(*args, **kwargs))
            return kept[-1]

        # `compile` assumes that every tensor is aligned; the normal launcher looks at the addresses, as is done here.
        address = partial(lambda make, dtype, _: make(dtype, next(addresses)), kda_runtime.launch.Address)
        with patch.object(triton, "compile", keep), patch.object(kda_runtime.launch, "Address", address):
            launch.compile(TARGET)
        (made,) = kept
        scratch = made.metadata.global_scratch_size + made.metadata.profile_scratch_size
        program = parse(made.asm["ptx"])
        names = tuple(name for name, kind in made.src.signature.items() if kind != "constexpr")
        if scratch or program.threads != WARP * made.metadata.num_warps or len(program.params) != len(names) + 2:
            raise PtxError(f"kernel {program.name}: expected {names} and two unused scratch pointers as parameters")
        _COMPILED[key] = Compiled(program, names, made.metadata.shared)
    return _COMPILED[key]


def run_launch(
    launch: Launch, tensors: Sequence[torch.Tensor], ahead: Traffic | None = None, options: Options = DEFAULT
) -> Traffic:
    """Do on the machine what `Launch.run` does, after a kernel with the accesses `ahead`; returns its own accesses."""
    rest = iter(tensors)
    made = compiled(launch, tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors))
    free = [name for name in launch.kernel.arg_names if name not in launch.constexprs]
    given = dict(zip(free, launch.args, strict=False))
    given |= {name: next(rest) for name, value in given.items() if isinstance(value, torch.dtype)}
    values = [*(given[name] for name in made.names), 0, 0]
    sized = zip(made.program.params, values, strict=True)
    params = pack_params(
        made.program, [struct.pack(FORMATS[param.size], _word(value, param.size)) for param, value in sized]
    )
    before = Ahead(runs=bool(launch.options.get("launch_pdl")), traffic=ahead)
    return execute(made.program, launch.grid, tensors, params, 1, made.shared_bytes, before, options)


def _word(value: object, size: int) -> int:
    """A parameter of so many bytes as an unsigned integer: a tensor's address, or an integer's two's complement."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if not isinstance(value, int) or not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
        raise PtxError(f"expected a tensor or an integer of {size} bytes as a parameter, got {value!r}")
    return value % (1 << (8 * size))


@contextmanager
def launching_on_the_machine(options: Options = DEFAULT, cute: Iterable[type[Any]] = ()) -> Iterator[list[Any]]:
    """Within the block `Launch.run` takes tensors of the CPU and runs on the machine; the list receives the launches.

    The same holds for the classes `cute`, a solution's launches of CuTe DSL kernels (`cute.CuteLaunch`). The first
    launch runs after an unknown kernel, which may be writing anything; each other launch runs after the one before.
    Within the block new tensors are full of NaN, so that elements that a kernel does not write show.
    """
    launched: list[Any] = []
    ahead: Traffic | None = None

    def run(launch: Any, *tensors: torch.Tensor) -> None:
        nonlocal ahead
        launched.append(launch)
        if isinstance(launch, Launch):
            ahead = run_launch(launch, tensors, ahead, options)
        else:
            ahead = run_cute(launch, *tensors, options=options, before=ahead)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what `empty` makes
    try:
        with ExitStack() as stack:
            for kind in (Launch, *cute):
                stack.enter_context(patch.object(kind, "run", run))
            yield launched
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def on_the_machine(task: Task, options: Options = DEFAULT) -> Iterator[list[Any]]:
    """Within the block the task's public functions launch on the machine, though their tensors are on the CPU."""
    forget_plans(task.path / "solution")
    with ExitStack() as stack:
        for module in (kda_runtime.op, *modules_of(task)):
            if hasattr(module, "elsewhere"):
                stack.enter_context(patch.object(module, "elsewhere", lambda *_, **__: None))
        yield stack.enter_context(launching_on_the_machine(options, _cute_launches(task)))


def _cute_launches(task: Task) -> set[type[Any]]:
    """The solution's classes of CuTe DSL launches. Their modules are imported here; a solution imports them late."""
    names = {path.stem for path in (task.path / "solution").glob("*.py")} - {"__init__"}
    for package in {str(module.__package__) for module in modules_of(task)}:
        for name in sorted(names):
            with suppress(ModuleNotFoundError):  # the DSL is not installed
                importlib.import_module(f"{package}.{name}")
    held = [value for module in modules_of(task) for value in vars(module).values()]
    return {value for value in held if isinstance(value, type) and hasattr(value, "run") and "with_code" in vars(value)}


def modules_of(task: Task) -> list[ModuleType]:
    """The loaded modules of the task's solution, under every name by which the folder was imported."""
    task.load("solution")
    inside = str(task.path / "solution")
    return [module for module in list(sys.modules.values()) if str(getattr(module, "__file__", "")).startswith(inside)]
