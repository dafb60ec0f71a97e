"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..baseline import eager
from ..solution import (
    apply_ltx2_split_rotary_emb,
    apply_rotary_embedding,
    common,
    ltx2_rotary,
    rotary,
    why_not,
)
from .cases import assert_matches, halves, pairs, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check_pairs(tensors, **scalars):
    assert why_not("apply_rotary_embedding", *tensors, **scalars) is None
    assert_matches(apply_rotary_embedding, tensors, **scalars)


def check_halves(tensors):
    assert why_not("apply_ltx2_split_rotary_emb", *tensors) is None
    assert_matches(apply_ltx2_split_rotary_emb, tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 64, 96, 128, 256, 512])
def test_head_sizes(dim, dtype):
    check_pairs(pairs((5, 6, dim), dtype, device=DEVICE))


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 33])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_head_counts_and_batches(batch, heads):
    check_pairs(pairs((*batch, 5, heads, 128), device=DEVICE))


@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize(("columns", "interleaved"), [(64, False), (64, True), (128, False), (128, True), (192, True)])
def test_which_columns_of_the_tables(columns, interleaved, table):
    check_pairs(pairs(columns=columns, rows=9, table=table, device=DEVICE), interleaved=interleaved)


@pytest.mark.parametrize("batch", [(), (1,), (2,)])
def test_packed_qkv(batch):
    check_pairs(pairs((*batch, 5, 6, 128), packed=True, device=DEVICE))


def test_batches_that_do_not_follow_each_other():
    tensors = pairs((3, 7, 6, 64), device=DEVICE)
    tensors[0] = tensors[0][:, 1:-1]
    check_pairs(tensors)


def test_permuted_x_gives_a_permuted_result():
    tensors = pairs((2, 6, 5, 64), rows=6, device=DEVICE)
    tensors[0] = tensors[0].transpose(1, 2)  # heads in front of tokens in memory
    assert apply_rotary_embedding(*tensors).stride() == tensors[0].stride()
    check_pairs(tensors)


def test_tables_with_any_strides():
    tensors = pairs(device=DEVICE)
    tensors[1:] = [tensors[1].t().contiguous().t(), tensors[2].repeat(1, 2)[:, ::2][:, :64]]
    check_pairs(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "half"), [(32, 32), (32, 64), (8, 64), (3, 32), (33, 64), (5, 20), (1, 3)])
@pytest.mark.parametrize("view", [True, False])
def test_ltx2_sizes(heads, half, dtype, view):
    check_halves(halves(heads=heads, half=half, dtype=dtype, view=view, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ltx2_rounds_in_its_own_order(dtype):
    x, cos, sin = halves(dtype=dtype, device=DEVICE)
    x[..., :8] = 0
    x[..., 8:16] = -0.0
    got = apply_ltx2_split_rotary_emb(x, cos, sin)
    # The product with sin is exact in float32, so PyTorch's separate operations must give the same bits.
    assert torch.equal(got, eager.apply_ltx2_split_rotary_emb(x, cos, sin))
    # Without the inner rounding the result is another one.
    a, b = x.float().unflatten(-1, (32, 2, 32)).unbind(-2)
    unrounded = a * cos.transpose(1, 2).float() - b * sin.transpose(1, 2).float()
    assert not torch.equal(got.unflatten(-1, (32, 2, 32))[..., 0, :], unrounded.to(dtype))


def test_ltx2_tables_of_several_layouts():
    x, cos, sin = halves(device=DEVICE)
    check_halves([x, cos.contiguous(), sin])
    check_halves([x, cos[:1].expand(2, -1, -1, -1), sin[:1].expand(2, -1, -1, -1)])


def test_ltx2_x_with_gaps():
    x, cos, sin = halves(tokens=6, device=DEVICE)
    packed = torch.cat((x, x, x), dim=-1)
    check_halves([packed[..., : x.shape[-1]], cos, sin])
    check_halves([x[:, 1:], cos[:, :, 1:], sin[:, :, 1:]])


def test_nothing_to_rotate():
    check_pairs(pairs((0, 6, 128), device=DEVICE))
    check_halves(halves(tokens=0, device=DEVICE))


CONFIGS = {*rotary.TUNED.configs, *ltx2_rotary.TUNED.configs, common.Config(warps=2, tiles=2, tokens=3)}


@pytest.mark.parametrize("config", sorted(CONFIGS, key=str), ids=str)
def test_configurations(config):
    with rotary.TUNED.forced(config) as asked:
        check_pairs(pairs((2, 6, 24, 128), device=DEVICE))
        check_pairs(pairs((2, 5, 33, 96), device=DEVICE))
    assert asked
    with ltx2_rotary.TUNED.forced(config) as asked:
        check_halves(halves(tokens=6, half=64, device=DEVICE))
        check_halves(halves(tokens=5, heads=33, half=20, view=False, device=DEVICE))
    assert asked


def test_same_values_give_the_same_bits_in_every_layout():
    tensors = pairs((2, 5, 6, 128), device=DEVICE)
    want = apply_rotary_embedding(*tensors)
    packed = torch.cat([tensors[0]] * 3, dim=2)[:, :, :6]
    assert same_bits(want, apply_rotary_embedding(packed, *tensors[1:]))
    x, cos, sin = halves(device=DEVICE)
    assert same_bits(
        apply_ltx2_split_rotary_emb(x, cos, sin), apply_ltx2_split_rotary_emb(x, cos.contiguous(), sin.contiguous())
    )
