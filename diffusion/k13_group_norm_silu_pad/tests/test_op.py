"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re
from math import prod

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager
from ..bench import grid, reference
from ..solution import bias_residual, launches, residual, upsample_pad
from ..solution import group_norm_silu_pad as public
from ..solution.pixels import TUNED, Call, Config, Copy, _uncovered, plan
from .cases import MARGINS, arguments, assert_copied, assert_normed, assert_summed, normal, summands

FACTORS = [(1, 1), (1, 2), (2, 2), (2, 1)]

# --- the plain path and the other arms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 2, 3, 4, 32), (2, 1, 5, 5, 12), (2, 3, 1, 1, 4)], ids=str)
def test_plain_path(shape, dtype):
    for biased in (False, True):
        assert_normed(normal(*shape, dtype=dtype), 4, biased=biased)


def test_plain_path_of_float64():
    args = arguments(normal(1, 2, 3, 4, 32, dtype=torch.float64), 8, biased=True)
    assert public(*args).dtype is torch.float64
    assert (public(*args) - reference.group_norm_silu_pad(*args)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 3, 4, 2), (2, 4, 5, 5, 3), (0, 2, 3, 4, 2)], ids=str)
def test_plain_path_of_copies(shape, factors):
    assert_copied(normal(*shape, dtype=torch.float64), factors)
    assert_copied(normal(*shape), factors)


@pytest.mark.parametrize("how", grid.VECTORS)
def test_plain_path_of_sums(how):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert_summed(normal(2, 1, 3, 4, 12, dtype=dtype), how)
    args = summands(normal(1, 2, 3, 4, 6, dtype=torch.float64), how)
    assert (bias_residual(*args) - reference.bias_residual(*args)[0]).abs().max() < 1e-12


def test_the_arm_of_pytorch():
    for shape in ((1, 4, 5, 6, 32), (2, 1, 3, 4, 8)):
        for biased in (False, True):
            assert_normed(normal(*shape, dtype=torch.float32), 4, arm=eager, biased=biased)
        for factors in FACTORS:
            assert_copied(normal(*shape), factors, arm=eager)
        for how in grid.VECTORS:
            assert_summed(normal(*shape, dtype=torch.float32), how, arm=eager)


# --- what the kernels do not cover


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (normal(1, 32, 2, 3, 4).movedim(1, 4), r"x has shape \[1, 2, 3, 4, 32\] and strides"),
        (normal(1, 2, 3, 4, 40)[..., :32], "the kernels take no gaps"),
        (normal(1, 1, 1, 1, 1056), "x has 1056 channels; the kernels take up to 1024"),
        (torch.empty(1, 1, 65536, 1, 32, dtype=torch.float16, device="meta"), "the kernels' grid does not hold it"),
        (torch.empty(1, 65536, 1, 1, 32, dtype=torch.float16, device="meta"), "the kernels' grid does not hold it"),
        (torch.empty(1, 1, 1, 2**25, 32, dtype=torch.float16, device="meta"), "the kernels' grid does not hold it"),
        (torch.empty(1, 1, 2**15, 2**15, 32, dtype=torch.float16, device="meta"), "the kernels' grid does not hold it"),
        (normal(1, 2, 3, 4, 32, dtype=torch.float64), "x has dtype torch.float64"),
        (torch.nn.Parameter(normal(1, 2, 3, 4, 32)), "x requires gradients"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else None,
)
def test_what_the_kernels_do_not_cover(x, reason):
    vectors = [torch.empty(x.shape[4], dtype=x.dtype, device=x.device) for _ in range(3)]
    assert re.search(reason, _uncovered(Call(x, *vectors, 8, 1e-5, *MARGINS)))
    assert re.search(reason, _uncovered(Copy(x, 1, 1, *MARGINS)))


def test_a_weight_with_gaps():
    x, weight, bias, _, *numbers = arguments(normal(1, 2, 3, 4, 32), 8)
    gaps = torch.stack((weight, bias), dim=1)
    assert "weight has shape [32] and strides (2,)" in _uncovered(Call(x, gaps[:, 0], bias, None, *numbers))
    assert torch.equal(public(x, gaps[:, 0], gaps[:, 1], bias, *numbers), public(x, weight, bias, bias, *numbers))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": normal(1, 32, 2, 3, 4).movedim(1, 4)}, r"x has shape \[1, 2, 3, 4, 32\] and strides"),
        ({"residual": normal(1, 2, 3, 4, 40)[..., :32]}, r"residual has shape \[1, 2, 3, 4, 32\] and strides"),
        ({"residual_bias": normal(64)[::2]}, r"residual_bias has shape \[32\] and strides \(2,\)"),
        ({"bias": normal(32, dtype=torch.float64)}, "bias has dtype torch.float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_sums_that_the_kernel_does_not_cover(change, reason):
    call = residual.Call(*summands(normal(1, 2, 3, 4, 32), "both"))._replace(**change)
    assert re.search(reason, residual._uncovered(call))
    assert (bias_residual(*call) - reference.bias_residual(*call)[0]).abs().max() <= 1e-2


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((1, 1, 1, 1, 1056), "x has 1056 channels"), ((1, 2, 2**15, 2**15, 8), f"x has {2**31} pixels")],
    ids=str,
)
def test_sums_that_are_too_large(shape, reason):
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    assert reason in residual._uncovered(residual.Call(x, x[0, 0, 0, 0], x, None))


# --- what has no meaning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": normal(3, 4, 5, 32)}, r"x: expected five dimensions \[B, T, H, W, C\], got \[3, 4, 5, 32\]"),
        ({"x": normal(1, 2, 0, 5, 32)}, "x: expected a frame, a line and a column to repeat, got"),
        ({"num_groups": 0}, "num_groups: expected a positive integer, got 0"),
        ({"num_groups": 5}, "num_groups: expected a divisor of x's 32 channels, got 5"),
        ({"weight": normal(31)}, r"weight: expected shape \[32\], got \[31\]"),
        ({"bias": normal(1, 32)}, r"bias: expected shape \[32\], got \[1, 32\]"),
        ({"x_bias": normal(16)}, r"x_bias: expected shape \[32\], got \[16\]"),
        ({"bias": None}, "bias: expected a tensor, got None"),
        ({"frames": -1}, "frames: expected 0 or more, got -1"),
        ({"width": -2}, "width: expected 0 or more, got -2"),
    ],
)
def test_meaningless_arguments_are_named(change, message):
    call = Call(*arguments(normal(1, 2, 3, 4, 32), 8))
    with pytest.raises(ValueError, match=f"group_norm_silu_pad: {message}"):
        public(*call._replace(**change))


def test_a_factor_of_nothing_is_named():
    with pytest.raises(ValueError, match="upsample_pad: up_frames: expected 1 or more, got 0"):
        upsample_pad(normal(1, 2, 3, 4, 8), 0, 2, *MARGINS)
    with pytest.raises(ValueError, match="upsample_pad: source: expected five dimensions"):
        upsample_pad(normal(2, 3, 4, 5), 2, 2, *MARGINS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": normal(3, 4, 5, 32)}, r"x: expected five dimensions \[B, T, H, W, C\], got \[3, 4, 5, 32\]"),
        ({"bias": normal(16)}, r"bias: expected shape \[32\], got \[16\]"),
        ({"bias": None}, "bias: expected a tensor, got None"),
        ({"residual_bias": normal(1, 32)}, r"residual_bias: expected shape \[32\], got \[1, 32\]"),
        ({"residual": normal(1, 1, 3, 4, 32)}, r"residual: expected shape \[1, 2, 3, 4, 32\], got \[1, 1, 3, 4, 32\]"),
        ({"residual": None}, "residual_bias: expected None, as there is no residual, got a tensor"),
    ],
)
def test_meaningless_summands_are_named(change, message):
    call = residual.Call(*summands(normal(1, 2, 3, 4, 32), "both"))
    with pytest.raises(ValueError, match=f"bias_residual: {message}"):
        bias_residual(*call._replace(**change))


# --- how calls become launches


def test_every_pixel_has_a_program_and_sizes_are_no_constants():
    constants = set()
    for row in grid.grid():
        with TUNED.forced(Config()):  # a table may have other tiles for other sizes
            found = launches(row.op, meta_tensors(row), row.scalars)
        if not found:
            assert "of-another-order" in row.id
            continue
        *statistics, written = found
        (output,) = row.outputs.values()
        if row.op == "bias_residual":
            assert written.grid[1:] == (1, 1)
            pixels, rows = prod(output.shape[:4]), written.constexprs["ROWS"]
            assert 0 <= written.grid[0] * rows - pixels < rows
            continue
        batch, frames, lines, columns, channels = output.shape
        assert written.grid[1:] == (lines, batch * frames)
        assert written.grid[0] * written.constexprs["ROWS"] >= columns
        assert written.constexprs["BLOCK"] >= channels
        if channels == 32:
            constants.add((written.name, *written.constexprs["FORM"], written.constexprs["ROWS"]))
        if statistics:
            first, second = statistics
            pixels, length = first.args[2:4]
            assert second.args[5:8] == (pixels, first.grid[0], length)
            assert length % (first.constexprs["ROWS"] * first.constexprs["TILES"]) == 0
            assert (first.grid[0] - 1) * length < pixels <= first.grid[0] * length
            assert first.grid[0] <= Config().stretches
            assert second.grid == (row.scalars["num_groups"], batch, 1)
    assert len(constants) == len(grid.MARGINS) * 2, "two sizes of elements"


def test_scratch_is_the_calls_own():
    x = torch.empty(2, 3, 4, 5, 64, dtype=torch.float16, device="meta")
    vector = x.new_empty(64)
    chain = plan(Call(x, vector, vector, None, 8, 1e-5, *MARGINS))
    parts, affine = chain.scratch
    assert parts.shape == (2, chain.launches[0].grid[0], 3, 64)
    assert affine.shape == (2, 3, 64)
    assert {parts.dtype, affine.dtype} == {torch.float32}
