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
from core.tests.ptx.parse import Program, parse
from core.tests.ptx.run import DEFAULT, Ahead, Options, pack_params

if TYPE_CHECKING:
    from diffusion.k07_group_norm_silu.solution.cluster import ClusterLaunch

KEEP = f"--gpu-arch {TARGET} --keep-ptx --dump-dir"


def run_cluster(launch: "ClusterLaunch", *tensors: torch.Tensor, options: Options = DEFAULT) -> None:
    """k07's cluster kernel, of y, x, weight and bias."""
    program = _cluster_program(launch._compiled_for)
    elements, channel, total, groups, group_channels = launch.sizes
    structures = [
        *(_structure(tensor, "q", *tensor.shape, *tensor.stride()[:-1]) for tensor in tensors[:2]),
        *(_structure(tensor, "i", *tensor.shape) for tensor in tensors[2:]),
    ]
    numbers = [struct.pack("i", number) for number in (elements, channel, groups, group_channels)]
    params = pack_params(program, [*structures, *numbers])
    shared = 8 * (launch.blocks + launch.warps + 1)  # as `ClusterLaunch.compile` says
    grid, ahead = (total * launch.blocks, 1, 1), Ahead(runs=launch.pdl)
    execute(program, grid, tensors, params, launch.blocks, shared, ahead, options)


@functools.cache
def _cluster_program(compiled_for: tuple[object, ...]) -> Program:
    from diffusion.k07_group_norm_silu.solution import cluster

    with TemporaryDirectory() as folder:
        return parse(cluster._compiled(*compiled_for, options=f"{KEEP} {folder}").artifacts.PTX)


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
