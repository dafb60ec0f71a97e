"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted.

`test_ptx.py` executes the alignment, which is no Triton kernel, on the CPU.
"""

import pytest
import torch

from ..solution import topk, topk_softmax, topk_sum, why_not
from .cases import ALIGN, SUM, TOPK, align_arguments, check, normal, sum_arguments, topk_arguments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# --- top-k


def check_topk(logits, k, bias=None, **scalars):
    tensors = topk_arguments(logits, k, bias)
    assert why_not(TOPK, **tensors, **scalars) is None
    check(TOPK, tensors, **scalars)
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (128, 4), (256, 8), (60, 6), (4, 2), (1, 1), (512, 10), (9, 9)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts(experts, k, dtype, renormalize):
    check_topk(normal(3, experts, dtype=dtype, device=DEVICE), k, renormalize=renormalize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scalars", [{"moe_softcapping": 2.0}, {}, {"moe_softcapping": 30.0, "renormalize": True}], ids=str
)
def test_cap_and_bias(dtype, scalars):
    check_topk(normal(2, 64, dtype=dtype, device=DEVICE), 8, normal(64, dtype=torch.float32, device=DEVICE), **scalars)


def test_the_largest_comes_first_and_of_equal_ones_the_lower_id():
    logits = torch.zeros(1, 128, dtype=torch.bfloat16, device=DEVICE)
    logits[0, 100], logits[0, 77] = 3, 5
    tensors = check_topk(logits, 8, renormalize=True)
    assert tensors["topk_ids"].tolist() == [[77, 100, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("value", [float("-inf"), -3e38, 3e38])
def test_far_logits(value):
    logits = normal(2, 128, device=DEVICE)
    logits[:, 5:9] = value
    tensors = check_topk(logits, 8)
    assert tensors["topk_weights"].isfinite().all()


def test_all_negative_logits_beside_columns_that_do_not_exist():
    check_topk(normal(2, 60, device=DEVICE) - 100, 8, renormalize=True)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("k", [3, 8, 12])
def test_lanes(lanes, k):
    with topk.TUNED.forced(topk.Config(1, lanes)) as asked:
        check_topk(normal(5, 128, device=DEVICE), k)
    assert asked


def test_no_tokens():
    tensors = topk_arguments(normal(0, 128, device=DEVICE), 8)
    assert topk_softmax(**tensors) is None


# --- sum


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8, 2048), (3, 4, 2880), (2, 1, 8), (5, 6, 30), (0, 8, 64)])
def test_sum(shape, dtype):
    tensors = sum_arguments(normal(*shape, dtype=dtype, device=DEVICE))
    assert why_not(SUM, **tensors) is None
    check(SUM, tensors)


@pytest.mark.parametrize("config", [*topk_sum.TUNED.configs, topk_sum.Config(2, rows=2)], ids=str)
def test_every_tuned_configuration_of_the_sum(config):
    with topk_sum.TUNED.forced(config) as asked:
        for tokens in (1, 4, 5):
            check(SUM, sum_arguments(normal(tokens, 4, 1100, device=DEVICE)))
    assert asked


# --- alignment


def ids_of(tokens, k, experts, dtype=torch.int32, low=0):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(low, experts, (tokens, k), generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "experts", "block"), [(1, 128, 16), (9, 7, 5), (300, 256, 64), (5000, 32, 128)])
@pytest.mark.parametrize("pad_sorted_token_ids", [False, True])
def test_align(tokens, experts, block, dtype, pad_sorted_token_ids):
    tensors = align_arguments(ids_of(tokens, 8, experts, dtype), experts + 1, block, slack=3)
    scalars = {"num_experts": experts + 1, "block_size": block, "pad_sorted_token_ids": pad_sorted_token_ids}
    if DEVICE == "cuda":
        assert why_not(ALIGN, **tensors, **scalars) is None
    check(ALIGN, tensors, **scalars)


def test_one_expert_has_all_pairs():
    ids = torch.full((2000, 8), 3, dtype=torch.int32, device=DEVICE)
    check(ALIGN, align_arguments(ids, 129, 64), num_experts=129, block_size=64, pad_sorted_token_ids=True)
