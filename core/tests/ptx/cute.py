"""How the CuTe DSL kernels become runs of the machine. What the DSL passes to a kernel is written down here.

A tensor is a structure: its address, then the sizes and strides that the compiler was not told; a None is no parameter.
"""

import functools
import struct
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from core.tests.ptx.kernels import TARGET
from core.tests.ptx.machine import execute
from core.tests.ptx.parse import Program, PtxError, parse
from core.tests.ptx.run import DEFAULT, Ahead, Options, Traffic, pack_params

if TYPE_CHECKING:
    from diffusion.k07_group_norm_silu.solution.dsl import CuteLaunch

KEEP = f"--gpu-arch {TARGET} --keep-ptx --dump-dir"


def run_cute(
    launch: "CuteLaunch", *tensors: torch.Tensor, options: Options = DEFAULT, before: Traffic | None = None
) -> None:
    """One of k07's launches, of its tensors, behind a kernel with the accesses `before`."""
    program, described, rest = _program(type(launch), launch.constants), launch.with_code(b""), iter(tensors)
    values = [p if isinstance(p, bytes) else struct.pack("Q", next(rest).data_ptr()) for p in described.params]
    if program.threads != described.threads or [param.size for param in program.params] != list(map(len, values)):
        raise PtxError(f"kernel {program.name}: expected {described.threads} threads, {list(map(len, values))} bytes")
    ahead, shared = Ahead(runs=described.dependent, traffic=before), described.dynamic_shared_bytes
    params = pack_params(program, values)
    execute(program, described.grid, tensors, params, described.cluster, shared, ahead, options)


@functools.cache
def _program(kind: "type[CuteLaunch]", constants: tuple[object, ...]) -> Program:
    import cutlass.cute

    with TemporaryDirectory() as folder:
        compiled = cutlass.cute.compile(kind.function, *kind.arguments(constants), options=f"{KEEP} {folder}")
        return parse(compiled.artifacts.PTX)


def run_lab(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    blocks: int,
    second: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    options: Options = DEFAULT,
) -> None:
    """k04's kernel that stays on `blocks` blocks; `second` is y2, weight2 and scale2."""
    from diffusion.k04_norm_tanh_mul_add.lab import cutedsl

    columns = x.shape[-1]
    program = _lab_program(x.dtype, columns, second is not None)
    y2, weight2, scale2 = second or (None, None, None)
    whole, line = {id(y), id(y2), id(x), id(shift)}, struct.pack("f", eps)
    given = [tensor for tensor in (y, y2, x, weight, scale, shift, weight2, scale2) if tensor is not None]
    rows = x.shape[0] * x.shape[1]
    structures = [_structure(tensor, "i", *([rows] if id(tensor) in whole else [])) for tensor in given]
    ring = 2 * cutedsl.STAGES * columns * x.itemsize
    shared = ring + 2 * 4 * cutedsl.Kernel(columns, second is not None).warps
    params, ahead = pack_params(program, [*structures, line]), Ahead(runs=True)
    execute(program, (blocks, 1, 1), given, params, 1, shared, ahead, options)


@functools.cache
def _lab_program(dtype: torch.dtype, columns: int, double: bool) -> Program:
    from diffusion.k04_norm_tanh_mul_add.lab import cutedsl

    with TemporaryDirectory() as folder:
        return parse(cutedsl.compiled.__wrapped__(dtype, columns, double, f"{KEEP} {folder}").artifacts.PTX)


def _structure(tensor: torch.Tensor, index: str, *numbers: int) -> bytes:
    """A tensor's address and what of its layout is an argument, as integers of the kind `index` of `struct`."""
    return struct.pack(f"Q{len(numbers)}{index}", tensor.data_ptr(), *numbers)
