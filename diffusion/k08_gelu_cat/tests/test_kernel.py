"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..bench import tune
from ..solution import fused_gelu_tanh_cat, gelu_tanh_cat, why_not
from .cases import OP, assert_right, every, make, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check(attn, mlp):
    assert why_not(OP, attn, mlp) is None
    assert_right(attn, mlp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("attn", "mlp"), [(8, 8), (96, 200), (3072, 1032), (1, 1), (7, 9), (1025, 2049)])
def test_widths(attn, mlp, dtype):
    check(*make((2, 3), attn, mlp, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("packed", [288, 1, 3])
def test_mlp_behind_other_columns(packed):
    check(*make(packed=packed, device=DEVICE))


@pytest.mark.parametrize("leading", [(), (1,), (7,), (1, 1), (3, 2, 5), (257,)])
def test_leading_sizes(leading):
    check(*make(leading, device=DEVICE))
    check(*make(leading, packed=96, device=DEVICE))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., :96],
        lambda x: x[..., 3:],
        lambda x: x[0, :1].expand(4, 128),
        lambda x: x[:, :1],
        lambda x: x[::2, 1],
    ],
)
def test_attn_where_it_lies(view):
    attn = view(normal(4, 3, 128, device=DEVICE))
    check(attn, normal(*attn.shape[:-1], 72, device=DEVICE))


def test_more_than_a_tile_of_two_widths():
    check(*make((1, 2), 3072, 12288, packed=9216, device=DEVICE))


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config):
    with gelu_tanh_cat.TUNED.forced(config) as asked:
        check(*make((3, 3), 1100, 2048, packed=64, device=DEVICE))
    assert asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits(dtype):
    numbers = every(dtype).to(DEVICE)
    got = fused_gelu_tanh_cat(numbers, numbers)
    assert torch.equal(got[: 2**16].view(torch.int16), numbers.view(torch.int16)), "copied bit for bit"
    got, finite = got[2**16 :], numbers.isfinite()
    want = torch.nn.functional.gelu(numbers.double(), approximate="tanh")
    assert torch.equal(got.isnan(), numbers.isnan() | (numbers == -torch.inf)), "-inf * 0, as in PyTorch"
    assert got[numbers == torch.inf] == torch.inf
    error = (got.double() - want)[finite].abs()
    form = torch.finfo(dtype)
    half_a_step = want[finite].abs().clamp(min=form.smallest_normal) * form.eps * 0.51
    assert bool((error <= half_a_step + numbers[finite].double().abs().clamp(max=8) * 1e-7).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_to_tanh_give_the_same_bits(dtype):
    """On a GPU, and on the PTX machine; Triton's interpreter has one way alone."""
    if dtype == torch.float32:
        numbers = normal(1 << 16, dtype=dtype) * torch.exp2(torch.linspace(-30, 5, 1 << 16))
    else:
        numbers = every(dtype)
    outputs = []
    for library in (False, True):
        with gelu_tanh_cat.TUNED.forced(gelu_tanh_cat.Config(4, library=library)):
            outputs.append(fused_gelu_tanh_cat(numbers[:8].to(DEVICE), numbers.to(DEVICE)))
    known = ~outputs[0].isnan()
    assert torch.equal(known, ~outputs[1].isnan())
    words = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(*(output[known].view(words) for output in outputs))
