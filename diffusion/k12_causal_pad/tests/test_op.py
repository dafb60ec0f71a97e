"""The ops around their kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import random
import re
from math import prod

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager, primary
from ..bench import grid
from ..solution import causal_pad as public
from ..solution import launches, upsample_causal_pad
from ..solution.causal_pad import Call, Divisor, _uncovered, divisor
from .cases import MARGINS, assert_right, normal

# --- the plain path and the other arms

FACTORS = [None, (1, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2, 1, 3, 4), (2, 3, 4, 5, 5), (0, 2, 1, 3, 4), (2, 0, 1, 3, 4)], ids=str)
def test_plain_path(shape, dtype, factors):
    assert_right(normal(*shape, dtype=dtype), factors=factors)


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("arm", [primary, eager], ids=["primary", "eager"])
def test_arms_of_pytorch(arm, factors):
    for shape in ((1, 2, 4, 5, 6), (2, 1, 1, 3, 4)):
        assert_right(normal(*shape), factors=factors, arm=arm)


# --- what the kernel does not cover


@pytest.mark.parametrize(
    ("x", "numbers", "reason"),
    [
        (normal(1, 2, 3, 4, 5).transpose(1, 2), (2, 1, 1, 1, 1), r"x has shape \[1, 3, 2, 4, 5\] and strides"),
        (normal(1, 2, 3, 4, 9)[..., :5], (2, 1, 1, 1, 1), "the kernel takes contiguous tensors"),
        (normal(1, 2, 3, 5, 1), (2, 1, 0, 1, 1), "the output has 1 columns"),
        (normal(1, 2, 3, 4, 5, dtype=torch.float64), (2, 1, 1, 1, 1), "x has dtype torch.float64"),
        (torch.nn.Parameter(normal(1, 2, 3, 4, 5)), (2, 1, 1, 1, 1), "x requires gradients"),
    ],
)
def test_what_the_kernel_does_not_cover(x, numbers, reason):
    assert re.search(reason, _uncovered(Call(x, *numbers)))
    frames, height, width, *factors = numbers
    assert launches("upsample_causal_pad", {"source": x}, named(*factors, frames, height, width)) == []
    with torch.no_grad():
        assert_right(x, margins=numbers[:3])


def named(up_frames, up_space, frames, height, width):
    return {"up_frames": up_frames, "up_space": up_space, "frames": frames, "height": height, "width": width}


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((1, 1, 1, 2**15, 2**15), True),
        ((1, 1, 1, 2**16, 2**15), False),
        ((2**8, 2**8 - 1, 1, 2, 2), True),
        ((2**8, 2**8, 1, 2, 2), False),
        ((1, 1, 2**16 - 3, 2, 2), True),
        ((1, 1, 2**16 - 2, 2, 2), False),
        ((1, 2**15 - 1, 2**16 - 3, 2, 2), True),
        ((1, 2**15 + 1, 2**16 - 3, 2, 2), False),
    ],
    ids=str,
)
def test_what_the_grid_holds(shape, fits):
    reason = _uncovered(Call(torch.empty(shape, dtype=torch.float16, device="meta"), *MARGINS, 1, 1))
    assert reason is None if fits else "grid does not hold them" in reason


# --- what has no meaning


@pytest.mark.parametrize(
    ("x", "numbers", "message"),
    [
        (normal(2, 3, 4, 5), MARGINS, r"causal_pad: x: expected five dimensions \[B, C, T, H, W\], got \[2, 3, 4, 5\]"),
        (normal(1, 2, 3, 4, 5), (-1, 1, 1), "causal_pad: frames: expected 0 or more, got -1"),
        (normal(1, 2, 3, 4, 5), (2, 1, -2), "causal_pad: width: expected 0 or more, got -2"),
        (normal(1, 2, 0, 4, 5), MARGINS, "causal_pad: x: expected a frame, a line and a column to repeat, got"),
    ],
)
def test_meaningless_arguments_are_named(x, numbers, message):
    with pytest.raises(ValueError, match=message):
        public(x, *numbers)


def test_a_factor_of_nothing_is_named():
    with pytest.raises(ValueError, match="upsample_causal_pad: up_frames: expected 1 or more, got 0"):
        upsample_causal_pad(normal(1, 2, 3, 4, 5), 0, 2, *MARGINS)
    with pytest.raises(ValueError, match="upsample_causal_pad: source: expected five dimensions"):
        upsample_causal_pad(normal(2, 3, 4, 5), 2, 2, *MARGINS)


# --- how calls become launches


def test_divisors_divide_every_number_below_2_31():
    draw = random.Random(0)
    for d in (*range(2, 600), 66564, 2**20, 2**20 + 1, 2**30, 2**30 + 1, 2**31 - 1):
        found = divisor(d)
        assert -(2**31) <= found.factor < 0, "an int32 of one sign, so that nothing is compiled again"
        largest = (2**31 - 1) // d * d
        numbers = {0, 1, d - 1, d, d + 1, largest - 1, largest, 2**31 - 1, *(draw.randrange(2**31) for _ in range(20))}
        assert all(divided(n, found) == n // d for n in numbers if n < 2**31)


def divided(n: int, by: Divisor) -> int:
    return (n * (by.factor + 2**32) >> 32) >> by.shift


def test_every_element_has_a_program_and_sizes_are_no_constants():
    constants = set()
    for row in grid.thin(grid.grid()):
        for launch in launches(row.op, meta_tensors(row), row.scalars):
            (output,) = row.outputs.values()
            batch, channels, frames, *sizes = output.shape
            assert launch.grid[1] == frames
            assert launch.grid[2] * launch.constexprs["CHANNELS"] == batch * channels
            assert launch.grid[0] * launch.constexprs["BLOCK"] * launch.constexprs["PAIR"] >= prod(sizes)
            constants.add(tuple(launch.constexprs["FORM"]))
    assert len(constants) == len(grid.MARGINS) + len(grid.FACTORS), "thinned, only the first margins have factors"
