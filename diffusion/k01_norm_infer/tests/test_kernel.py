"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import norm, norm_infer, why_not
from .cases import assert_norm, assert_one_pass, make, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(rms=False, eps=1e-6, out=None, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not("norm_infer", *tensors, eps, rms, out) is None
    assert_norm(*tensors, eps, rms, out)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("width", [1, 7, 96, 128, 130, 1536, 5120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(width, dtype, rms):
    check(rms, rows=3, width=width, dtype=dtype)


@pytest.mark.parametrize(("width", "dtype"), [(16384, torch.float32), (32768, torch.bfloat16)])
def test_widest_rows(width, dtype):
    check(rows=2, width=width, dtype=dtype)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 33])
def test_row_counts_that_fill_programs_and_that_do_not(rows):
    check(rows=rows)
    assert_one_pass(*make(rows, device=DEVICE)[:2])


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("affine", [(), ("weight",), ("bias",)])
def test_parameters_that_are_left_out(affine, rms):
    check(rms, affine=affine)
    check(rms, affine=affine, width=1536)


def test_parameters_of_another_dtype():
    x, weight, bias = make(device=DEVICE)
    assert_norm(x, weight.float(), bias.half())


def test_large_mean_keeps_its_digits():
    x, weight, bias = make(rows=3, width=5120, dtype=torch.float32, offset=1000.0, device=DEVICE)
    (want,) = (torch.nn.functional.layer_norm(x.double(), (5120,), weight.double(), bias.double(), 1e-6),)
    # 1000 is known to 6e-5, and the weights reach 4.
    assert (norm_infer(x, weight, bias, 1e-6).double() - want).abs().max() < 5e-4


def test_large_eps():
    check(eps=0.5)


@pytest.mark.parametrize("rms", [False, True])
def test_rows_apart(rms):
    check(rms, gap=7)
    check(rms, gap=128, rows=9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_in_a_wider_buffer_of_any_dtype_leaves_the_rest_alone(dtype):
    tensors = make(device=DEVICE)
    buffer = torch.full((5, 160), 7.0, dtype=dtype, device=DEVICE)
    assert why_not("norm_infer", *tensors, 1e-6, out=buffer[:, :128]) is None
    assert_norm(*tensors, out=buffer[:, :128])
    assert (buffer[:, 128:] == 7.0).all()


@pytest.mark.parametrize("shape", [{}, {"rows": 33}, {"width": 1536}, {"gap": 32}])
def test_out_is_x(shape):
    tensors = make(device=DEVICE, **shape)
    assert_norm(*tensors, out=tensors[0])


def test_out_overlaps_an_x_with_gaps():
    buffer = normal(18, 128, device=DEVICE)
    _, weight, bias = make(device=DEVICE)
    assert_norm(buffer[::2], weight, bias, out=buffer[:9])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, :2],  # not one stride for all rows: copied
        lambda x: x[:, :1],
        lambda x: x[0, 0],
        lambda x: x[..., :96],
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(1, 2),
        lambda x: x[:1, :1].expand(3, 4, 128),
        lambda x: x[None, :, :, None],
    ],
)
def test_one_pass_layouts(view):
    x = view(normal(3, 4, 128, device=DEVICE))
    w = normal(x.shape[-1], device=DEVICE)
    assert why_not("triton_one_pass_rms_norm", x, w) is None
    assert_one_pass(x, w)
    assert_one_pass(x, w[None])


@pytest.mark.parametrize("width", [128, 5120])
@pytest.mark.parametrize("config", norm.TUNED.configs, ids=str)
def test_every_tuned_configuration(config, width):
    for rows in (32, 35):
        with norm.TUNED.forced(config) as asked:
            check(rows=rows, width=width, dtype=torch.float32)
            assert_one_pass(*make(rows, width, device=DEVICE)[:2])
        assert len(asked) == 2
