"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch
from torch import nn

from ..solution import apply_group_norm_silu, triton_group_norm_silu, why_not
from ..solution.plans import TUNED, Config
from .cases import assert_op, make, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OP = "triton_group_norm_silu"
METHODS = {
    "whole": Config("whole", warps=1),
    "stretch": Config("stretch", warps=1, tiles=2),
    "front to back": Config("stretch", warps=1, tiles=2, reverse=False, early=False, pdl=False),
    "flow": Config("flow", warps=1, tiles=2, ahead_mb=0),
    "flow, front to back": Config("flow", warps=2, tiles=1, ahead_mb=1e-3, reverse=False, hints=True, store=".cs"),
}
if DEVICE == "cuda":
    # Shapes whose vectors are not whole, and for the ring channels that are no part, take `whole` or `stretch`.
    METHODS |= {"cluster": Config("cluster", warps=1, blocks=8), "large cluster": Config("cluster", warps=4, blocks=16)}
    METHODS |= {
        "ring": Config("ring", warps=1, tiles=1, resident=16),
        "longer ring": Config("ring", warps=2, tiles=1, resident=16, stages=6, ahead=3, store=".cs"),
    }
methods = pytest.mark.parametrize("config", METHODS.values(), ids=METHODS.keys())


def check(config, groups, eps=1e-5, allowed=1e-5, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not(OP, *tensors, groups, eps) is None
    with TUNED.forced(config):
        assert_op(*tensors, groups, eps, allowed=allowed)


@methods
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 6, 2, 200), 3),  # 800 elements a group: vectors of 8
        ((1, 6, 7, 58), 3),  # of 2
        ((2, 4, 555), 2),  # of 1
        ((3, 4), 2),
        ((1, 2, 1, 3, 4), 1),
        ((1, 3, 1, 1), 3),  # a group of one element is 0, and weight has no say
    ],
)
def test_shapes(config, shape, groups, dtype):
    check(config, groups, shape=shape, dtype=dtype)


@methods
def test_parts_that_are_all_full(config):
    check(config, 3, shape=(1, 6, 512))


@methods
def test_large_mean_keeps_its_digits(config):
    # 1000 is known to 6e-5, and the weights reach 2.
    check(config, 2, shape=(1, 4, 1001), dtype=torch.float32, offset=1000.0, allowed=5e-4)


@methods
def test_groups_of_very_different_size(config):
    x, weight, bias = make((2, 4, 600), torch.float32, DEVICE)
    x *= torch.tensor([1e-3, 1.0, 30.0, 1e3], device=DEVICE)[:, None]
    with TUNED.forced(config):
        assert_op(x, weight, bias, 2)


@methods
def test_mean_that_drifts_from_part_to_part(config):
    x, weight, bias = make((1, 2, 2000), torch.float32, DEVICE)
    x += torch.arange(2000, device=DEVICE) / 10
    with TUNED.forced(config):
        assert_op(x, weight, bias, 1, allowed=1e-4)


@methods
def test_large_eps(config):
    check(config, 2, eps=0.5)


@methods
def test_results_do_not_change_from_call_to_call(config):
    tensors = make((2, 4, 999), device=DEVICE)
    with TUNED.forced(config):
        first = triton_group_norm_silu(*tensors, 2)
        assert all(torch.equal(first, triton_group_norm_silu(*tensors, 2)) for _ in range(2))


@methods
def test_outputs_far_below_zero_are_zero_and_not_nan(config):
    x, weight, bias = make(device=DEVICE)
    with TUNED.forced(config):
        y = triton_group_norm_silu(x, weight, bias - 200, 4)
    assert (y == 0).all()


@methods
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_group_without_statistics_is_nan_and_no_other_is(config, value):
    x, weight, bias = make((2, 4, 600), device=DEVICE)
    want = triton_group_norm_silu(x, weight, bias, 2)
    x[1, 1, 333] = value
    with TUNED.forced(config):
        y = triton_group_norm_silu(x, weight, bias, 2)
        whole = triton_group_norm_silu(torch.cat([x[:1], x[:1]]), weight, bias, 2)
    assert y[1, :2].isnan().all()
    assert torch.equal(y[0], whole[0])
    torch.testing.assert_close(y[1, 2:], want[1, 2:])


@methods
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_of_another_dtype(config, dtype):
    x, weight, bias = make(device=DEVICE)
    with TUNED.forced(config):
        assert_op(x, weight.to(dtype), bias.bfloat16())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, :, :3],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x.transpose(2, 3),
    ],
)
def test_layouts(view):
    x = view(normal(2, 8, 3, 5, device=DEVICE))
    weight, bias = make((1, x.shape[1]), device=DEVICE)[1:]
    assert why_not(OP, x, weight, bias, 4) is None
    assert_op(x, weight, bias)


@pytest.mark.parametrize("config", TUNED.configs, ids=str)
def test_every_tuned_configuration(config):
    check(config, 2, shape=(1, 4, 3000))


@torch.no_grad()
def test_modules():
    norm = nn.GroupNorm(4, 8, eps=1e-6, device=DEVICE)
    torch.nn.init.normal_(norm.weight)
    x = normal(2, 8, 3, 5, dtype=torch.float32, device=DEVICE)
    assert why_not("apply_group_norm_silu", x, norm, nn.SiLU()) is None

    def op(x, weight, bias, num_groups, eps):
        return apply_group_norm_silu(x, norm, nn.SiLU())

    assert_op(x, norm.weight, norm.bias, 4, 1e-6, op)
