"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..bench import tune
from ..bench.grid import VECTORS
from ..solution import group_norm_silu_pad, residual, upsample_pad, why_not
from ..solution.pixels import TUNED, Config
from .cases import MARGINS, arguments, assert_copied, assert_normed, assert_summed, normal, summands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check(x, groups, margins=MARGINS, **more):
    assert why_not("group_norm_silu_pad", *arguments(x, groups, margins, **more)) is None
    assert_normed(x, groups, margins, **more)


def check_copy(source, factors=(1, 1), margins=MARGINS):
    assert why_not("upsample_pad", source, *factors, *margins) is None
    assert_copied(source, factors, margins)


def check_sum(x, how="both"):
    assert why_not("bias_residual", *summands(x, how)) is None
    assert_summed(x, how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (32, 4), (96, 32), (30, 5), (128, 32), (7, 1)], ids=str)
@pytest.mark.parametrize("clip", [(1, 2, 5, 6), (2, 1, 3, 2), (1, 3, 1, 9)], ids=str)
def test_channels_and_groups(clip, channels, groups, dtype):
    check(normal(*clip, channels, dtype=dtype, device=DEVICE), groups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (32, 4), (30, 5), (128, 32)], ids=str)
def test_a_bias_of_x(channels, groups, dtype):
    check(normal(2, 2, 5, 6, channels, dtype=dtype, device=DEVICE), groups, biased=True)
    check(normal(1, 1, 3, 5, channels, dtype=dtype, device=DEVICE, mean=3.0), groups, eps=0.5, biased=True)


@pytest.mark.parametrize("channels", [512, 1024])
def test_many_channels(channels):
    check(normal(1, 1, 3, 4, channels, device=DEVICE), 32, margins=(1, 0, 0))
    check_copy(normal(1, 1, 1, 2, channels, device=DEVICE), margins=(1, 0, 1))


@pytest.mark.parametrize("margins", [(0, 0, 0), (0, 1, 1), (2, 0, 0), (1, 3, 2), (4, 0, 5)], ids=str)
def test_margins(margins):
    check(normal(1, 2, 3, 4, 32, device=DEVICE), 8, margins)
    check_copy(normal(2, 2, 3, 4, 8, device=DEVICE), (2, 2), margins)


@pytest.mark.parametrize("pixels", [15, 16, 17, 63, 64, 65, 129])
def test_stretches_that_end_anywhere(pixels):
    with TUNED.forced(Config(warps=1, vectors=1, tiles=2, stretches=3)) as asked:  # 16 pixels of 32 channels at a time
        check(normal(1, 1, 1, pixels, 32, device=DEVICE), 8)
        check(normal(2, 1, pixels, 1, 32, device=DEVICE), 4, margins=(0, 0, 0))
    assert asked


def test_more_stretches_than_a_program_reads_at_a_time():
    with TUNED.forced(Config(warps=1, vectors=2, tiles=1)) as asked:  # 8 pixels at a time, and 128 stretches
        check(normal(1, 1, 3, 400, 30, device=DEVICE), 1, margins=(0, 0, 0))
    assert asked


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_that_is_large_beside_the_deviation(dtype):
    check(normal(1, 2, 9, 10, 32, dtype=dtype, device=DEVICE, mean=50.0), 8)


@pytest.mark.parametrize("clip", [(16, 1, 1, 1), (16, 1, 1, 3), (4, 3, 2, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_few_elements_far_from_zero_and_close_together(clip, biased):
    # The mean of such a group, or of its channel, needs more digits than one float32 has.
    x = normal(*clip, 96, dtype=torch.float32, device=DEVICE, mean=64.0)
    check(x, 32, margins=(0, 0, 0), eps=0.05, biased=biased)


def test_a_constant_clip():
    check(torch.full((1, 2, 3, 4, 32), 3.0, dtype=torch.float16, device=DEVICE), 8)


def test_nan_and_infinity_stay_in_their_group():
    for bad in (float("nan"), float("inf")):
        x = normal(1, 2, 3, 4, 32, device=DEVICE)
        x[0, 1, 2, 3, 5] = bad
        y = group_norm_silu_pad(*arguments(x, 8))
        assert y[..., 4:8].isnan().all()
        assert not y[..., :4].isnan().any()
        assert not y[..., 8:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", [(1, 1), (1, 2), (2, 2), (3, 1), (2, 3)], ids=str)
def test_upsampling(factors, dtype):
    check_copy(normal(1, 3, 3, 5, 24, dtype=dtype, device=DEVICE), factors)
    check_copy(normal(2, 1, 1, 1, 5, dtype=dtype, device=DEVICE), factors, margins=(0, 2, 0))


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config):
    with TUNED.forced(config) as asked:
        check(normal(1, 2, 4, 33, 64, device=DEVICE), 32, biased=True)
        check_copy(normal(1, 2, 3, 17, 32, device=DEVICE), (2, 2))
    assert asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_is_copied(dtype):
    bits = torch.arange(2**16, dtype=torch.int32).sub(2**15).to(torch.int16).view(1, 4, 16, 64, 16)
    for part in bits.split(1, dim=1):  # Triton's interpreter takes no more at a time
        got = upsample_pad(part.contiguous().view(dtype).to(DEVICE), 1, 1, 0, 0, 1).view(torch.int16).cpu()
        assert torch.equal(got[:, :, :, 1:-1], part)
        assert torch.equal(got[..., 0, :], got[..., 1, :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", VECTORS)
@pytest.mark.parametrize("shape", [(1, 2, 5, 6, 32), (2, 1, 3, 7, 96), (1, 3, 1, 9, 30), (1, 1, 1, 1, 7)], ids=str)
def test_sums(shape, how, dtype):
    check_sum(normal(*shape, dtype=dtype, device=DEVICE), how)


@pytest.mark.parametrize("config", [*tune.sums()], ids=str)
def test_every_configuration_of_the_sum(config):
    with residual.TUNED.forced(config) as asked:
        check_sum(normal(1, 2, 4, 33, 64, device=DEVICE))
        check_sum(normal(1, 1, 1, 3, 1024, device=DEVICE), "residual")
    assert asked


def test_a_sum_is_rounded_once():
    # 2048 + 1 rounds to 2048 in float16, so that two roundings would lose both ones.
    x = torch.full((1, 1, 1, 2, 32), 2048.0, dtype=torch.float16, device=DEVICE)
    one = torch.ones_like(x)
    assert (residual.bias_residual(x, one[0, 0, 0, 0], one, None) == 2050).all()
