"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..bench import tune
from ..solution import causal_pad as public
from ..solution import why_not
from ..solution.causal_pad import TUNED
from .cases import assert_right, normal, numbers_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FACTORS = [None, (1, 2), (2, 2), (3, 1), (2, 3)]


def check(x, **call):
    name, numbers = numbers_of(**call)
    assert why_not(name, x, *numbers) is None
    assert_right(x, **call)


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 5, 12, 10), (2, 2, 1, 7, 9), (1, 1, 2, 33, 64)], ids=str)
def test_shapes(shape, dtype, factors):
    check(normal(*shape, dtype=dtype, device=DEVICE), factors=factors)


@pytest.mark.parametrize("factors", FACTORS[:3], ids=str)
@pytest.mark.parametrize("margins", [(0, 1, 1), (2, 0, 0), (0, 0, 0), (1, 3, 2), (4, 0, 5), (1, 2, 3)], ids=str)
def test_margins(margins, factors):
    check(normal(1, 2, 3, 5, 6, device=DEVICE), margins=margins, factors=factors)


@pytest.mark.parametrize("picture", [(1, 1), (1, 2), (2, 1), (1, 300), (300, 1)], ids=str)
def test_small_pictures(picture):
    for factors in FACTORS:
        check(normal(1, 2, 2, *picture, device=DEVICE), factors=factors)


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config):
    with TUNED.forced(config) as asked:
        check(normal(2, 2, 2, 30, 33, device=DEVICE))
        check(normal(1, 2, 2, 17, 20, device=DEVICE), factors=(2, 2))
    assert asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_is_copied(dtype):
    bits = torch.arange(2**16, dtype=torch.int32).sub(2**15).to(torch.int16).view(1, 1, 4, 128, 128)
    got = public(bits.view(dtype).to(DEVICE), 1, 0, 1).view(torch.int16).cpu()
    assert torch.equal(got[:, :, 1:, :, 1:-1], bits)
    assert torch.equal(got[..., 0], got[..., 1])
    assert torch.equal(got[:, :, 0], got[:, :, 1])
