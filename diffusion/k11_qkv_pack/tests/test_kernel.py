"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..bench import tune
from ..solution import qkv_norm_rope_pack, qkv_pack, why_not
from .cases import OP, assert_matches, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("tables", "cache", "none")


def check(eps=1e-6, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not(OP, **tensors, eps=eps) is None
    assert_matches(qkv_norm_rope_pack, tensors, eps=eps)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sizes(dim, dtype, form):
    check(dim=dim, dtype=dtype, form=form)


@pytest.mark.parametrize("form", ["tables", "cache"])
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_tokens_beyond_the_last_row_are_not_rotated(rows, form):
    check(rows=rows, form=form)


@pytest.mark.parametrize("layout", ["packed", "mlp"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tensors_are_read_where_they_lie(layout, batch):
    check(layout=layout, batch=batch, rows=3)


def test_tensors_with_strides_of_their_own():
    tensors = make(device=DEVICE, batch=2)
    for number, name in enumerate(("q", "k", "v")):
        wide = tensors[name].new_zeros(2, 5 + number, 6 + number, 128 + 8 * number)
        wide[:, :5, :6, :128] = tensors[name]
        tensors[name] = wide[:, :5, :6, :128]
    assert why_not(OP, **tensors) is None
    assert_matches(qkv_norm_rope_pack, tensors)


def test_tables_with_gaps():
    tensors = make(device=DEVICE)
    for name in ("cos", "sin"):
        tensors[name] = torch.cat((tensors[name], tensors[name]), dim=-1)[:, :64]
    assert_matches(qkv_norm_rope_pack, tensors)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 24, 30])
def test_head_counts_that_fill_tiles_and_that_do_not(heads):
    check(heads=heads, tokens=2)


@pytest.mark.parametrize("batch", [1, 2])
def test_two_streams_in_one_tensor(batch):
    """As in a double block: each call writes its tokens of the joint tensor, and nothing else."""
    text, clip = make(3, batch=batch, form="none", device=DEVICE), make(5, batch=batch, device=DEVICE)
    joint = torch.full((3, batch, 9, 6, 128), 7.0, device=DEVICE, dtype=torch.bfloat16)
    for tensors, out in ((clip, joint[:, :, :5]), (text, joint[:, :, 5:8])):
        assert why_not(OP, **tensors, out=out) is None
        assert qkv_norm_rope_pack(**tensors, out=out) is out
    assert torch.equal(joint[:, :, :5], qkv_norm_rope_pack(**clip))
    assert torch.equal(joint[:, :, 5:8], qkv_norm_rope_pack(**text))
    assert bool((joint[:, :, 8] == 7).all())


def test_large_eps():
    check(eps=0.5)


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config):
    with qkv_pack.TUNED.forced(config) as asked:
        check(tokens=2, heads=30)
    assert asked
