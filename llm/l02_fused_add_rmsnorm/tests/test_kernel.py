"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import why_not
from ..solution.rmsnorm import MAX_COLUMNS, TUNED, Config
from .cases import assert_fused, assert_norm, make, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(eps=1e-6, **shape):
    """Both ops, rmsnorm in place and into another tensor."""
    x, residual, weight = make(device=DEVICE, **shape)
    assert why_not("fused_add_rmsnorm", x, residual, weight, eps) is None
    assert_fused(x, residual, weight, eps)
    assert why_not("rmsnorm", residual, weight, x, eps) is None
    assert_norm(residual, weight, x, eps)
    assert_norm(residual, weight, None, eps)


@pytest.mark.parametrize("width", [1, 7, 96, 130, 512, 2880, 5120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(width, dtype):
    check(rows=3, width=width, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widest_rows(dtype):
    check(rows=2, width=MAX_COLUMNS, dtype=dtype)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
def test_row_counts_that_fill_programs_and_that_do_not(rows):
    for config in (Config(8), Config(1, beside=4), Config(2, rows=2)):
        with TUNED.forced(config):
            check(rows=rows)
            check(rows=rows, width=520)


def test_large_eps():
    check(eps=0.5)


def test_rows_apart_leave_what_is_between_them_alone():
    check(gap=7)
    check(gap=64, rows=9)
    x, residual, weight = make(gap=64, device=DEVICE)
    between = [tensor.as_strided((4, 64), (192, 1), 128) for tensor in (x, residual)]
    keep = [tensor.clone() for tensor in between]
    assert_fused(x, residual, weight)
    assert all(torch.equal(*pair) for pair in zip(between, keep, strict=True))


def test_the_second_part_of_wider_rows():
    """As the latent of a projection is normalised."""
    wide = normal(5, 2112, device=DEVICE)
    assert_norm(wide[:, 1536:2048], normal(512, device=DEVICE), torch.empty(5, 512, dtype=wide.dtype, device=DEVICE))
    assert_norm(wide[:, :1536], normal(1536, device=DEVICE))


def test_out_is_input():
    x, _, weight = make(device=DEVICE)
    assert_norm(x, weight, x)


@pytest.mark.parametrize("shape", [(128,), (2, 3, 128)])
def test_other_dimensions(shape):
    x, residual, weight = (
        normal(*shape, device=DEVICE),
        normal(*shape, device=DEVICE, seed=3),
        normal(128, device=DEVICE),
    )
    assert why_not("fused_add_rmsnorm", x, residual, weight) is None
    assert_fused(x, residual, weight)
    assert_norm(residual, weight, x)


def test_weight_of_another_dtype():
    x, residual, weight = make(device=DEVICE)
    assert_fused(x, residual, weight.float())


@pytest.mark.parametrize("width", [520, 2880])
@pytest.mark.parametrize("config", TUNED.configs, ids=str)
def test_every_tuned_configuration(config, width):
    for rows in (4, 7):
        with TUNED.forced(config) as asked:
            check(rows=rows, width=width)
        assert len(asked) == 3
