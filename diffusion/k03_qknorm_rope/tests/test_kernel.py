"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import fused_inplace_qknorm_rope, qknorm_rope, why_not
from .cases import assert_matches, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(64, 64), (128, 64), (128, 128), (256, 64), (256, 128), (256, 256)]


def check(neox=False, eps=1e-6, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not("fused_inplace_qknorm_rope", *tensors, is_neox=neox, eps=eps) is None
    assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=neox, eps=eps)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("dim", "rope"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes(dim, rope, neox, dtype):
    check(neox, dim=dim, rope=rope, dtype=dtype)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("rope", [2, 20, 96])
def test_rope_dims_without_aligned_vectors(rope, neox):
    check(neox, rope=rope)


@pytest.mark.parametrize(("q_heads", "k_heads"), [(24, 24), (30, 30), (32, 8), (33, 1), (1, 1)])
def test_head_counts_that_fill_tiles_and_that_do_not(q_heads, k_heads):
    check(tokens=2, q_heads=q_heads, k_heads=k_heads)


@pytest.mark.parametrize("neox", [False, True])
def test_packed_qkv_leaves_the_rest_of_the_buffer_alone(neox):
    tensors = make(packed=True, device=DEVICE)
    q = tensors[0]
    whole = q.as_strided((5, 10, 128), q.stride(), 0)
    v = whole[:, 8:].clone()
    assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=neox)
    assert torch.equal(whole[:, 8:], v)


def test_positions_int32_and_large_eps():
    check(positions=torch.int32, eps=0.5)


def test_zero_tokens():
    check(tokens=0)


@pytest.mark.parametrize("config", qknorm_rope.TUNED.configs, ids=str)
def test_every_tuned_configuration(config):
    with qknorm_rope.TUNED.forced(config) as asked:
        check(tokens=3, q_heads=30, k_heads=30)
        check(True, tokens=3, q_heads=30, k_heads=30)
    assert asked


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("dim", "rope"), SIZES)
@pytest.mark.parametrize(("q_heads", "k_heads"), [(3, 3), (8, 2), (1, 5)])
def test_a_flat_row_of_heads(dim, rope, neox, q_heads, k_heads):
    config = qknorm_rope.Config(warps=4, tiles=1, flat=True)
    with qknorm_rope.TUNED.forced(config) as asked:
        check(neox, tokens=5, dim=dim, rope=rope, q_heads=q_heads, k_heads=k_heads)
        check(neox, tokens=5, dim=dim, rope=rope, packed=True, positions=torch.int32)
    assert asked


@pytest.mark.parametrize("neox", [False, True])
def test_loads_of_all_tiles_ahead_of_the_first_use(neox):
    with qknorm_rope.TUNED.forced(qknorm_rope.Config(warps=4, tiles=3, early=True)) as asked:
        check(neox, tokens=2, q_heads=24, k_heads=30)
    assert asked
