import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kda_judge.arms import triton_interpreter
from kda_judge.arms.float8 import nearest_e4m3, widened_e4m3
from kda_judge.contract.errors import MissingRequirement

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1 as the last test sets")

UPPER = np.arange(1 << 16, dtype=np.uint32) << 16
"""Every bfloat16 value, NaN and both infinities among them, as bits of float32."""


def around():
    """Float32 values: each of bfloat16, its tie with the next one, that tie's neighbours, and 16 between."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    drawn = np.random.default_rng(0).integers(0, 1 << 16, (16, 1), dtype=np.uint32)
    return np.concatenate([UPPER | lower[:, None], UPPER | drawn]).view(np.float32)


def same(got, want):
    """Equal to the last bit, but for the bits of NaN."""
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    assert torch.equal(got.view(torch.int16)[~nan], want.view(torch.int16)[~nan])


def test_bfloat16_is_the_nearest():
    values = around()
    got = torch.from_numpy(triton_interpreter.nearest_bfloat16(values)).view(torch.bfloat16)
    assert got.shape == values.shape
    same(got, torch.from_numpy(values).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("bits", "nearest"),
    [
        (0x3F80_7FFF, 0x3F80),
        (0x3F80_8000, 0x3F80),  # ties: to the even one, below or above
        (0x3F81_8000, 0x3F82),
        (0xBF81_8000, 0xBF82),
        (0x3F80_8001, 0x3F81),
        (0x3FFF_8000, 0x4000),  # carries into the exponent
        (0x0000_0001, 0x0000),  # subnormal
        (0x0000_8000, 0x0000),
        (0x0001_8000, 0x0002),
        (0x007F_8000, 0x0080),
        (0x8000_0000, 0x8000),
        (0x7F7F_7FFF, 0x7F7F),
        (0x7F7F_8000, 0x7F80),  # beyond the largest
        (0xFF7F_FFFF, 0xFF80),
        (0x7F80_0000, 0x7F80),
        (0xFF80_0000, 0xFF80),
        (0x7F80_0001, 0x7FFF),  # NaN stays NaN, although its upper half is that of infinity
        (0xFFFF_FFFF, 0x7FFF),
    ],
)
def test_values_by_hand(bits, nearest):
    for shape in ((), (1,), (2, 3)):
        values = np.full(shape, bits, dtype=np.uint32).view(np.float32)
        assert np.array_equal(triton_interpreter.nearest_bfloat16(values), np.full(shape, nearest, dtype=np.uint16))


def test_values_need_not_be_contiguous():
    values = around()[:, ::7].T
    assert np.array_equal(
        triton_interpreter.nearest_bfloat16(values), triton_interpreter.nearest_bfloat16(values.copy())
    )


@triton.jit
def convert(y, z, x, N: tl.constexpr):
    """By a conversion, and by a store to a pointer of another dtype."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, value.to(y.dtype.element_ty))
    tl.store(z + at, value)


@triton.jit
def cut(y, x, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_round_to_nearest(dtype):
    x = torch.from_numpy(around().reshape(-1))
    y, z = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
    convert[(22,)](y, z, x, N=1 << 16)
    same(y, x.to(dtype))
    same(z, x.to(dtype))


def of_float8():
    """Float32 values: each of float8_e4m3fn, ties and their neighbours, what saturates, and normal ones."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = exact[~exact.isnan()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, sign * torch.inf)) for sign in (1, -1)]
    large = torch.tensor([448.0, 464.0, 465.0, 1e30, torch.inf, torch.nan, -1e9, -torch.inf, 2.0**-10, 2.0**-11, 1e-40])
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 10, dtype=np.float32)) * 100
    return torch.cat([exact, ties, *beside, large, drawn])


def test_float8_is_the_nearest_and_saturates():
    x = of_float8()
    got = torch.from_numpy(nearest_e4m3(x.numpy()))
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    nan = x.isnan()
    assert torch.equal(got[~nan], want.view(torch.uint8)[~nan])
    assert (got[nan] == 0x7F).all()
    bits = torch.arange(256, dtype=torch.uint8)
    wide, known = torch.from_numpy(widened_e4m3(bits.numpy())), bits.view(torch.float8_e4m3fn).float()
    assert torch.equal(wide.isnan(), known.isnan())
    assert torch.equal(wide.nan_to_num(7), known.nan_to_num(7))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_round_to_float8_and_back(dtype):
    x = of_float8().to(dtype)
    x = x[: len(x) // 512 * 512]
    y, z = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    convert[(len(x) // 512,)](y, z, x, N=512)
    want = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    known = ~x.isnan()
    for got in (y, z):
        assert torch.equal(got.view(torch.uint8)[known], want.view(torch.uint8)[known])
        assert got.float()[~known].isnan().all()
    back = torch.empty_like(x)
    convert[(len(x) // 512,)](back, torch.empty_like(x), y, N=512)
    assert torch.equal(back[known], y[known].to(dtype))


@runs
def test_what_asks_to_be_cut_off_is():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 12, dtype=np.float32))
    y = torch.empty_like(x, dtype=torch.bfloat16)
    cut[(4,)](y, x, N=1 << 10)
    assert torch.equal(y.view(torch.int16), (x.view(torch.int32) >> 16).to(torch.int16))
    assert not torch.equal(y, x.to(torch.bfloat16))


@runs
def test_bfloat16_is_widened_to_the_bit():
    values = torch.from_numpy(UPPER.view(np.float32)).to(torch.bfloat16)
    y, z = torch.empty(1 << 16), torch.empty(1 << 16)
    convert[(1,)](y, z, values, N=1 << 16)
    for wide in (y, z):
        assert torch.equal(wide.view(torch.int32) >> 16, values.view(torch.int16).to(torch.int32))
        assert not (wide.view(torch.int32) & 0xFFFF).any()


@triton.jit
def fuse(out, x, y, z, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fused_multiply_add_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(1 << 12, generator=generator).to(dtype) for _ in range(3))
    # A product halfway between two values: what is added decides, however small it is.
    x[:3], y[:3] = 1 + torch.finfo(dtype).eps * 2 ** (8 if dtype == torch.float32 else 3), 1.5
    z[:3] = torch.tensor([0, 1, -1]) * torch.finfo(dtype).tiny
    out = torch.empty_like(x)
    fuse[(1,)](out, x, y, z, N=1 << 12)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    around = torch.stack([torch.nextafter(out, out - sign) for sign in (1, -1)]).double()
    for value, near, want in zip(out.tolist(), around.T.tolist(), exact, strict=True):
        assert abs(Fraction(value) - want) <= min(abs(Fraction(one) - want) for one in near)
    assert not torch.equal(out, x * y + z), "which rounds twice"


@runs
def test_a_second_call_changes_nothing():
    from triton.runtime.interpreter import InterpreterBuilder

    def now():
        return InterpreterBuilder.cast_impl, InterpreterBuilder.create_fma, InterpreterBuilder.create_fp_to_fp

    before = now()
    triton_interpreter.convert_as_a_gpu_does()
    assert now() == before


@pytest.fixture
def builder(monkeypatch):
    """What of Triton's interpreter converts, as it was once the test has ended."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", InterpreterBuilder.cast_impl)
    return InterpreterBuilder


@runs
def test_a_conversion_that_lies_elsewhere_is_refused(builder, monkeypatch):
    def cut_off(_, src, to):
        return type(src)((src.data.view(np.uint32) >> 16).astype(np.uint16), to.scalar)

    monkeypatch.setattr(builder, "create_fp_trunc", cut_off)
    with pytest.raises(MissingRequirement, match=r"cannot be replaced \(a kernel still converts as before\)"):
        triton_interpreter.convert_as_a_gpu_does()


@runs
def test_an_interpreter_without_its_private_names_is_refused(builder, monkeypatch):
    monkeypatch.delattr(builder, "cast_impl")
    with pytest.raises(MissingRequirement, match=r"cannot be replaced \(.*cast_impl.*\): use triton 3\.6"):
        triton_interpreter.convert_as_a_gpu_does()


@pytest.mark.skipif(interpreted, reason="kernels are interpreted")
def test_without_the_interpreter_triton_is_left_alone():
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.cast_impl
    triton_interpreter.convert_as_a_gpu_does()
    assert InterpreterBuilder.cast_impl is before


@pytest.mark.skipif(interpreted, reason="runs already")
def test_in_the_interpreter():
    """It has to be chosen before Triton is imported, so in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[3]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " 2 skipped" in done.stdout, "this test and the one above"
