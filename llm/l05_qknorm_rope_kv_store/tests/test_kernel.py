"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import fused_inplace_qknorm_rope_kv_store, qknorm_rope_kv_store, why_not
from .cases import assert_matches, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OP = "fused_inplace_qknorm_rope_kv_store"
SIZES = [(64, 64), (128, 64), (128, 128), (256, 64), (256, 128), (256, 256)]


def check(neox=True, eps=1e-6, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not(OP, *tensors, is_neox=neox, eps=eps) is None
    assert_matches(fused_inplace_qknorm_rope_kv_store, tensors, is_neox=neox, eps=eps)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("dim", "rope"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes(dim, rope, neox, dtype):
    check(neox, dim=dim, rope=rope, dtype=dtype)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("rope", [2, 20, 96])
def test_rope_dims_without_aligned_vectors(rope, neox):
    check(neox, rope=rope)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(32, 8), (32, 4), (64, 8), (33, 9), (1, 1)])
def test_head_counts_that_fill_tiles_and_that_do_not(q_heads, k_heads, neox):
    check(neox, tokens=2, q_heads=q_heads, k_heads=k_heads)


@pytest.mark.parametrize("neox", [False, True])
def test_v_of_a_packed_qkv_stays_as_it_is(neox):
    tensors = make(packed=True, device=DEVICE)
    v = tensors[2].clone()
    assert_matches(fused_inplace_qknorm_rope_kv_store, tensors, is_neox=neox)
    assert torch.equal(tensors[2], v)


def test_v_with_its_heads_side_by_side():
    tensors = make(packed=True, device=DEVICE)
    flat = tensors[2].as_strided((5, 256), (tensors[2].stride(0), 1), tensors[2].storage_offset())
    both = [*tensors[:2], flat, *tensors[3:]]
    assert why_not(OP, *both, is_neox=True) is None
    stored = tensors[4][tensors[9].long()]
    fused_inplace_qknorm_rope_kv_store(*both, is_neox=True)
    assert not torch.equal(tensors[4][tensors[9].long()], stored)
    assert torch.equal(tensors[4][tensors[9].long()], tensors[2].flatten(1))


def test_cache_rows_that_lie_apart():
    tensors = make(device=DEVICE)
    gaps = torch.full((11, 2, 300), 7.0, dtype=torch.bfloat16, device=DEVICE)
    for place, side in ((3, 0), (4, 1)):
        gaps[:, side, :256] = tensors[place]
        tensors[place] = gaps[:, side, :256]
    assert_matches(fused_inplace_qknorm_rope_kv_store, tensors, is_neox=True)
    assert (gaps[..., 256:] == 7).all()


def test_int32_indices_and_large_eps():
    check(index=torch.int32, eps=0.5)


def test_equal_tokens_may_share_a_slot():
    """As the padding of a captured graph does."""
    tensors = make(device=DEVICE)
    for place in (1, 2, 8, 9):
        tensors[place][1:3] = tensors[place][0].clone()
    assert_matches(fused_inplace_qknorm_rope_kv_store, tensors, is_neox=True)


def test_zero_tokens():
    check(tokens=0)


@pytest.mark.parametrize("config", qknorm_rope_kv_store.TUNED.configs, ids=str)
def test_every_tuned_configuration(config):
    with qknorm_rope_kv_store.TUNED.forced(config) as asked:
        check(tokens=3, q_heads=30, k_heads=6)
        check(False, tokens=3, q_heads=30, k_heads=6)
    assert asked
