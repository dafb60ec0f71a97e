"""The Triton device functions for rows, in one kernel that uses all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kda_runtime.broadcast import placed, row_stride
from kda_runtime.triton_rows import (
    affine,
    even_share,
    load_operand_row,
    load_operand_tile,
    load_row,
    load_tile,
    norm_chunk,
    operand_line,
    statistics,
    store_chunk,
    store_tile,
    vector_width,
    widen,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted, reason="needs a GPU, or TRITON_INTERPRET=1 as the last test sets"
)


def test_vector_width():
    assert [vector_width(4, 2), vector_width(4, 4), vector_width(1, 2)] == [1024, 512, 256]


@pytest.mark.parametrize(("total", "most", "share"), [(4, 3, 2), (3, 4, 3), (4, 2, 2), (7, 3, 3), (5, 1, 1)])
def test_even_share(total, most, share):
    assert even_share(total, most) == share


# --- the device functions, in one kernel that uses all of them


@triton.jit
def modulate(
    y,  # [ROWS of all programs, N]
    x,
    weight,
    bias,
    operand,
    rows,
    group,
    X_STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RMS: tl.constexpr,
    EXACT: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """TILES: a program has a tile of columns and adds the operand; else whole rows, which it normalises before.

    EARLY: weight and bias are loaded before they are needed.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = None if rows is None else row < rows
    line = operand_line(operand, row, group, FORM)
    if TILES:
        col += tl.program_id(1) * BLOCK
        value = load_tile(x + row * X_STRIDE, col, inside, N, N % BLOCK != 0, "").to(tl.float32)
        value += load_operand_tile(line, col, inside, N, N % BLOCK != 0, FORM).to(tl.float32)
        store_tile(y + row * N, value, col, inside, N, N % BLOCK != 0, "")
    else:
        chunks = load_row(x + row * X_STRIDE, col, inside, N, BLOCK, "")
        mean, inverse = statistics(chunks, col, 1e-6, N, BLOCK, RMS, EXACT)
        others = load_operand_row(line, col, inside, N, BLOCK, FORM)
        weights, biases = load_row(weight, col, None, N, BLOCK, ""), load_row(bias, col, None, N, BLOCK, "")
        for chunk in tl.static_range(len(chunks)):
            if EARLY:
                value = norm_chunk(chunks, chunk, mean, inverse, weights, biases)
            else:
                value = affine((chunks[chunk].to(tl.float32) - mean) * inverse, weight, bias, col, chunk, N, BLOCK)
            value += others[chunk].to(tl.float32)
            store_chunk(y + row * N, value, col, inside, chunk, N, BLOCK, "")


@triton.jit
def rounding(y, x, N: tl.constexpr):
    col = tl.arange(0, N)[None, :]
    store_tile(y, load_tile(x, col, None, N, False, ""), col, None, N, False, "")


@triton.jit
def widening(y, x, N: tl.constexpr):
    col = tl.arange(0, N)
    tl.store(y + col, widen(tl.load(x + col)))


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(
    operand,
    tiles=False,
    rms=False,
    exact=False,
    width=96,
    block=32,
    rows=1,
    weight=None,
    bias=None,
    offset=0.0,
    early=False,
):
    """The kernel's y, and the same in float64, for x [2, 6, width] with gaps between its rows."""
    x = normal(12, width + 5)[:, :width] + offset
    x = torch.nn.functional.pad(x, (0, 5))[:, :width]
    where = placed(operand, 2, 6)
    y = torch.full((12, width), torch.nan, device=DEVICE)
    constants = {"FORM": where.form, "N": width, "BLOCK": block, "ROWS": rows}
    constants |= {"RMS": rms, "EXACT": exact, "TILES": tiles, "EARLY": early, "X_STRIDE": row_stride(x)}
    count = 12 if 12 % rows else None
    grid = (-(-12 // rows), -(-width // block) if tiles else 1)
    modulate[grid](y, x, weight, bias, operand, count, where.group, **constants, num_warps=1)
    want = x.double().view(2, 6, width)
    if not tiles:
        want = want - (0 if rms else want.mean(-1, keepdim=True))
        want = want / (want.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        want = want * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())
    other = operand.double()
    if other.dim() == 4:
        other = other.squeeze(2).repeat_interleave(6 // other.shape[1], dim=1)
    want = want + (other[:, None] if other.dim() == 2 else other)
    return y.double().view(2, 6, width), want


SHAPES = [(), (1,), (96,), (2, 96), (2, 1), (2, 6, 96), (1, 6, 96), (2, 6, 1), (2, 3, 1, 96)]


@runs
class TestInTriton:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("rows", [1, 4, 8])  # 8: the last program is not full
    @pytest.mark.parametrize("tiles", [False, True])
    def test_every_form(self, shape, rows, tiles):
        torch.testing.assert_close(*run(normal(*shape, seed=1), tiles, rows=rows), atol=3e-6, rtol=3e-6)

    @pytest.mark.parametrize("width", [1, 31, 33, 96])
    @pytest.mark.parametrize("rms", [False, True])
    @pytest.mark.parametrize("exact", [False, True])
    def test_widths_and_statistics(self, width, rms, exact):
        parameters = {"weight": normal(width, seed=2), "bias": normal(width, seed=3)}
        got, want = run(normal(2, 1, width, seed=1), rms=rms, exact=exact, width=width, rows=2, **parameters)
        torch.testing.assert_close(got, want, atol=3e-6, rtol=3e-6)

    @pytest.mark.parametrize("parameters", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
    @pytest.mark.parametrize("early", [False, True])
    def test_affine_with_parts_left_out(self, parameters, early):
        got, want = run(normal(96, seed=1), early=early, **{name: normal(96, seed=2) for name in parameters})
        torch.testing.assert_close(got, want, atol=3e-6, rtol=3e-6)

    @pytest.mark.parametrize("tiles", [False, True])
    def test_an_operand_is_read_where_it_lies(self, tiles):
        table = normal(2, 6, 6, 96, seed=1)
        for operand in (table[:, :, 4], table[:, 0, 2], table[:1, :, 5].expand(2, -1, -1), table[0, 0, 0, :1]):
            torch.testing.assert_close(*run(operand, tiles, rows=4), atol=3e-6, rtol=3e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rounding_is_to_nearest_even(self, dtype):
        ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 0.0, -0.0, torch.inf, 3.4e38])
        x = torch.cat([ties.to(DEVICE), normal(56)])
        y = torch.empty_like(x, dtype=dtype)
        rounding[(1,)](y, x, 64)
        assert torch.equal(y, x.to(dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_bit_pattern_is_widened(self, dtype):
        x = torch.arange(2**16, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
        y = torch.empty_like(x, dtype=torch.float32)
        widening[(1,)](y, x, 2**16)
        number = ~x.isnan()
        assert torch.equal(y[number].view(torch.int32), x.float()[number].view(torch.int32))
        assert y[~number].isnan().all()

    @pytest.mark.parametrize(("exact", "most"), [(False, 2e-3), (True, 2e-4)])
    def test_a_large_mean_keeps_its_digits(self, exact, most):
        got, want = run(normal(96, seed=1), exact=exact, width=96, offset=1000.0)
        # float32 knows 1000 to 3e-5, and its square to 0.03, beside a variance of 1.
        assert (got - want).abs().max() < most


@pytest.mark.skipif(DEVICE == "cuda" or interpreted, reason="the tests above run on the GPU, or run already")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "TestInTriton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
