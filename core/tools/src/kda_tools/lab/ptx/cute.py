"""Turns launches of CuTe DSL kernels into runs of the machine.

The DSL passes a tensor as a structure: its address, then the sizes and strides that were not known when it was
compiled. It passes no parameter for a None.
"""

import functools
import struct
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from kda_tools.lab.ptx.machine import execute
from kda_tools.lab.ptx.parse import Program, PtxError, parse
from kda_tools.lab.ptx.run import DEFAULT, TARGET, Ahead, Options, Traffic, pack_params

if TYPE_CHECKING:
    from kda_runtime.cubin import CubinLaunch


class CuteLaunch(Protocol):
    """A solution's launch of a CuTe DSL kernel."""

    function: ClassVar[Callable[..., Any]]
    """The `@cute.jit` function that launches it."""

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constant parameters."""

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that `function` is compiled with."""

    def with_code(self, cubin: bytes) -> "CubinLaunch":
        """The launch of this machine code."""


KEEP = f"--gpu-arch {TARGET} --keep-ptx --dump-dir"


def run_cute(
    launch: CuteLaunch, *tensors: torch.Tensor, options: Options = DEFAULT, before: Traffic | None = None
) -> Traffic:
    """Run one launch on its tensors, after a kernel with the accesses `before`; returns its own accesses."""
    program, described, rest = _program(type(launch), launch.constants), launch.with_code(b""), iter(tensors)
    values = [p if isinstance(p, bytes) else struct.pack("Q", next(rest).data_ptr()) for p in described.params]
    if program.threads != described.threads or [param.size for param in program.params] != list(map(len, values)):
        raise PtxError(f"kernel {program.name}: expected {described.threads} threads, {list(map(len, values))} bytes")
    ahead, shared = Ahead(runs=described.dependent, traffic=before), described.dynamic_shared_bytes
    params = pack_params(program, values)
    return execute(program, described.grid, tensors, params, described.cluster, shared, ahead, options)


@functools.cache
def _program(kind: type[CuteLaunch], constants: tuple[object, ...]) -> Program:
    import cutlass.cute

    with TemporaryDirectory() as folder:
        compiled = cutlass.cute.compile(kind.function, *kind.arguments(constants), options=f"{KEEP} {folder}")
        return parse(compiled.artifacts.PTX)
