"""The kernel of `lab/cutedsl.py` as compiled for sm_90a, executed on the CPU by the PTX machine."""

import functools
import struct
from tempfile import TemporaryDirectory

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from kda_tools.lab.ptx.cute import KEEP
from kda_tools.lab.ptx.machine import execute
from kda_tools.lab.ptx.parse import Program, parse
from kda_tools.lab.ptx.run import DEFAULT, Ahead, Options, pack_params

from ..bench import reference
from ..lab import cutedsl


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
    with TemporaryDirectory() as folder:
        return parse(cutedsl.compiled.__wrapped__(dtype, columns, double, f"{KEEP} {folder}").artifacts.PTX)


def _structure(tensor: torch.Tensor, index: str, *numbers: int) -> bytes:
    """A tensor's address and what of its layout is an argument, as integers of the kind `index` of `struct`."""
    return struct.pack(f"Q{len(numbers)}{index}", tensor.data_ptr(), *numbers)


def assert_near(got, want):
    """Half a step of a 16-bit dtype, twenty of float32, whose sums are rounded too, and 1e-5 for terms that cancel."""
    steps = 20 if got.dtype == torch.float32 else 0.51
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=steps * torch.finfo(got.dtype).eps)


LABS = [
    # dtype, columns, batch, tokens, blocks
    (torch.bfloat16, 3840, 2, 7, 3),
    (torch.float16, 256, 1, 9, 2),
    (torch.bfloat16, 8192, 1, 3, 1),
    (torch.float16, 1280, 1, 2, 2),  # fewer rows than a block has stages
]


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize(("dtype", "columns", "batch", "tokens", "blocks"), LABS)
def test_k04_blocks_that_stay(dtype, columns, batch, tokens, blocks, double):
    oracle = reference.fused_norm_tanh_mul_add
    generator = torch.Generator().manual_seed(1)
    x, shift = (torch.randn(batch, tokens, columns, generator=generator).to(dtype) for _ in range(2))
    weight, weight2 = (torch.randn(columns, generator=generator).to(dtype) for _ in range(2))
    scale, scale2 = (torch.randn(1, 1, columns, generator=generator).to(dtype) for _ in range(2))
    outputs = []
    for options in (Options(), Options(late=False, apart=True)):
        y, y2 = (torch.full_like(x, float("nan")) for _ in range(2))
        second = (y2, weight2, scale2) if double else None
        run_lab(y, x, weight, scale, shift, 1e-5, blocks, second, options)
        outputs.append((y, y2) if double else (y,))
        assert_near(y, oracle(x, weight, None, scale, shift, "rms", 1e-5)[0])
        if double:  # of the y that is returned
            normed = y.double() * torch.rsqrt(y.double().square().mean(-1, keepdim=True) + 1e-5) * weight2
            assert_near(y2, normed * (1 + scale2.double()))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True)), "whenever blocks run, and copies arrive"
