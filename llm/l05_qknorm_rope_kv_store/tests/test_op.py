"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_runtime.checks import given

from ..baseline import eager
from ..bench import grid, reference
from ..solution import fused_inplace_qknorm_rope_kv_store, launches, qknorm_rope_kv_store, why_not
from .cases import assert_matches, make

OP = "fused_inplace_qknorm_rope_kv_store"


# --- the plain path and the eager arm


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rope", [64, 128])
def test_plain_path(neox, dtype, rope):
    tensors = make(dtype=dtype, rope=rope)
    tensors[7] = tensors[7].to(torch.promote_types(dtype, torch.float32))
    assert_matches(fused_inplace_qknorm_rope_kv_store, tensors, is_neox=neox)


@pytest.mark.parametrize("neox", [False, True])
def test_eager_arm(neox):
    op = eager.fused_inplace_qknorm_rope_kv_store
    assert_matches(op, make(rope=64, packed=True), is_neox=neox, head_dim=128, rope_dim=64)


# --- what the kernel does not cover


def transposed_last(tensors):
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)


def wide(tensors):
    tensors[:5] = [tensor.float() for tensor in tensors[:5]]


def recording(tensors):
    tensors[6] = torch.nn.Parameter(tensors[6])


def shared(tensors):
    tensors[4] = tensors[4][:1].expand(11, -1)


def columns(tensors):
    tensors[3] = tensors[3].T.contiguous().T


def far_heads(tensors):
    tensors[:] = make(device="meta")
    tensors[0] = torch.empty_strided(tensors[0].shape, (128, 2**31, 1), dtype=tensors[0].dtype, device="meta")


def odd_head(tensors):
    tensors[:] = make(dim=96, rope=64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (transposed_last, "q has stride 6 in its last dimension"),
        (columns, "k_cache has stride 11 in its last dimension"),
        (wide, "q has dtype torch.float32"),
        (recording, "k_weight requires gradients"),
        (shared, "v_cache has stride 0"),
        (odd_head, "head_dim is 96"),
        (far_heads, f"the heads of q are {2**31} elements apart"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    tensors = make()
    change(tensors)
    call = qknorm_rope_kv_store.Call(*tensors, is_neox=True)
    assert reason in qknorm_rope_kv_store._uncovered(call)
    assert launches(OP, given(call), {"is_neox": True}) == []


# --- what has no meaning


def normal(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, normal(5, 128), r"q: expected three dimensions .*, got \[5, 128\]"),
        (1, normal(4, 2, 128), r"k: expected shape \[5, k heads, 128\], as q, got \[4, 2, 128\]"),
        (1, torch.zeros(5, 2, 128), r"k: expected dtype torch.bfloat16, as q, got torch.float32"),
        (2, normal(5, 1, 128), r"v: expected shape \[5, 2, 128\], as k, or \[5, 256\], got \[5, 1, 128\]"),
        (3, normal(11, 2, 128), r"k_cache: expected shape \[slots, 256\], the heads .*, got \[11, 2, 128\]"),
        (4, torch.zeros(11, 256), r"v_cache: expected dtype torch.bfloat16, as q, got torch.float32"),
        (5, torch.zeros(64), r"q_weight: expected shape \[128\], got \[64\]"),
        (7, torch.zeros(9, 130), r"rope_dim: expected an even number from 2 to head_dim 128, got 130"),
        (7, torch.zeros(9, 63), r"rope_dim: expected an even number from 2 to head_dim 128, got 63"),
        (7, torch.zeros(9), r"cos_sin_cache: expected two dimensions .*, got \[9\]"),
        (8, torch.zeros(5, dtype=torch.int16), r"positions: expected dtype int32 or int64, got torch.int16"),
        (9, torch.arange(4), r"out_loc: expected shape \[5\], one per token, got \[4\]"),
    ],
)
def test_meaningless_tensors_are_named(position, value, message):
    tensors = make()
    tensors[position] = value
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope_kv_store(*tensors, is_neox=True)
    with pytest.raises(ValueError, match=message):
        why_not(OP, *tensors, is_neox=True)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"head_dim": 64}, "head_dim: expected 0 or q's last size 128, got 64"),
        ({"rope_dim": 64}, "rope_dim: expected 0 or the width 128 of cos_sin_cache, got 64"),
    ],
)
def test_meaningless_scalars_are_named(scalars, message):
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope_kv_store(*make(), is_neox=True, **scalars)


# --- how calls become launches


@pytest.mark.parametrize(
    ("heads", "tile", "most", "tiles"), [(32, 16, 4, 2), (64, 16, 3, 2), (30, 16, 1, 1), (1, 16, 4, 1)]
)
def test_tiles_are_even(heads, tile, most, tiles):
    # 4 warps hold 16 heads of 128 at two vectors of 8 elements a thread.
    with qknorm_rope_kv_store.TUNED.forced(qknorm_rope_kv_store.Config(4, most)):
        call = qknorm_rope_kv_store.Call(*make(q_heads=heads, k_heads=1, device="meta"), is_neox=True)
        launch = qknorm_rope_kv_store.plan(call)
    assert (launch.constexprs["HEADS"], launch.constexprs["Q"].tiles) == (tile, tiles)


def test_every_token_and_head_has_a_program():
    tensors = make(tokens=7, q_heads=30, k_heads=4, device="meta")
    (launch,) = launches(OP, given(qknorm_rope_kv_store.Call(*tensors, is_neox=True)), {"is_neox": True})
    tile, of_q, of_k = (launch.constexprs[name] for name in ("HEADS", "Q", "K"))
    assert launch.grid == (7 * (-(-30 // (tile * of_q.tiles)) + -(-4 // (tile * of_k.tiles))), 1, 1)


# --- rows


def test_bytes_are_counted_by_hand():
    """A token of one q head and one k head of 64, in bfloat16: seven heads of 128 bytes, and 256 bytes of angles."""
    row = grid._row(3, (1, 1), 64, 64, neox=True)
    assert reference.bytes_moved(row) == 3 * (7 * 128 + 256 + 8 + 8) + 2 * 128
