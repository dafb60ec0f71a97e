"""The kernels over their envelope: on a GPU the cluster's too; else the two launches, in Triton's interpreter."""

import pytest
import torch

from ..solution import plans, softmax, why_not
from .cases import assert_matches, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = 151936 if torch.cuda.is_available() else 5000


def check(logits, temperatures):
    assert why_not("softmax", logits, temperatures) is None
    assert_matches(softmax(logits, temperatures), logits, temperatures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 1001, LARGE])
def test_vocabularies(vocabulary, dtype):
    check(*make(vocabulary=vocabulary, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("elements", [128, 1024])
def test_many_parts(elements):
    with plans.TUNED.forced(plans.Config("split", 4, elements=elements)) as asked:
        check(*make(device=DEVICE))
    assert asked


@pytest.mark.parametrize("gap", [3, 8])
def test_rows_that_lie_apart(gap):
    logits, temperatures = make(vocabulary=1000 + gap, device=DEVICE)
    check(logits[:, :1000], temperatures)


def test_one_temperature_for_all_and_none():
    logits, temperatures = make(device=DEVICE)
    for given in (temperatures[:1], temperatures[0], None):
        check(logits, given)


def test_temperatures_that_lie_apart():
    logits, temperatures = make(device=DEVICE)
    apart = torch.cat((temperatures, temperatures + 1), dim=1)[:, :1]
    assert apart.stride(0) == 2
    check(logits, apart)


def test_temperatures_of_16_bits():
    logits, temperatures = make(device=DEVICE)
    check(logits, temperatures.to(torch.bfloat16))


def test_logits_far_apart_and_far_from_zero():
    logits, temperatures = make(device=DEVICE)
    check(logits * 1000, temperatures)
    check(logits + 3e4, temperatures)


def test_tokens_that_are_masked_have_no_probability():
    logits, temperatures = make(vocabulary=4000, device=DEVICE)
    logits[0, :3000] = float("-inf")  # whole parts of the row
    logits[1, 1:] = float("-inf")
    check(logits, temperatures)
    p = softmax(logits, temperatures)
    assert (p[0, :3000] == 0).all()
    assert p[1, 0] == 1


def test_a_negative_temperature_prefers_small_logits():
    logits, temperatures = make(device=DEVICE)
    check(logits, -temperatures)


def test_what_has_no_probabilities_is_nan_as_in_pytorch():
    logits, temperatures = make(rows=6, device=DEVICE)
    logits[0] = float("-inf")
    logits[1, 5] = float("inf")
    logits[2, 5] = float("nan")
    temperatures[3] = 0
    temperatures[4] = float("nan")
    p = softmax(logits, temperatures)
    assert p[:5].isnan().all()
    assert_matches(p[5:], logits[5:], temperatures[5:])


def test_extreme_temperatures():
    logits, temperatures = make(rows=3, device=DEVICE)
    temperatures[0], temperatures[1], temperatures[2] = 1e-30, float("inf"), 1e30
    p = softmax(logits, temperatures)
    assert p[0, logits[0].argmax()] == 1
    torch.testing.assert_close(p[1:], torch.full_like(p[1:], 1e-3))


@pytest.mark.parametrize("config", plans.TUNED.configs, ids=str)
def test_every_tuned_configuration(config):
    with plans.TUNED.forced(config) as asked:
        check(*make(rows=2, vocabulary=1000, device=DEVICE))
        check(*make(rows=2, vocabulary=LARGE, dtype=torch.bfloat16, device=DEVICE))
    assert asked
