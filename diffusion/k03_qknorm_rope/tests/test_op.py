"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_runtime.checks import given

from ..baseline import eager
from ..solution import fused_inplace_qknorm_rope, launches, qknorm_rope, why_not
from .cases import assert_matches, make

OP = "fused_inplace_qknorm_rope"


# --- the plain path and the eager arm


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rope", [64, 128])
def test_plain_path(neox, dtype, rope):
    tensors = make(dtype=dtype, rope=rope)
    tensors[4] = tensors[4].to(torch.promote_types(dtype, torch.float32))
    assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=neox)


@pytest.mark.parametrize("neox", [False, True])
def test_eager_arm(neox):
    assert_matches(eager.fused_inplace_qknorm_rope, make(rope=64, packed=True), is_neox=neox, head_dim=128, rope_dim=64)


# --- what the kernels do not cover


def transposed_last(tensors):
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)


def wide(tensors):
    tensors[:2] = [tensor.float() for tensor in tensors[:2]]


def recording(tensors):
    tensors[3] = torch.nn.Parameter(tensors[3])


def shared(tensors):
    tensors[1] = tensors[1][:, :1].expand(-1, 2, -1)


def odd_head(tensors):
    tensors[:] = make(dim=96, rope=64, device="cuda" if tensors[0].is_cuda else "cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (transposed_last, "q has stride 6 in its last dimension"),
        (wide, "q has dtype torch.float32"),
        (recording, "k_weight requires gradients"),
        (shared, "k has stride 0"),
        (odd_head, "head_dim is 96"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    tensors = make()
    change(tensors)
    call = qknorm_rope.Call(*tensors, is_neox=False)
    assert reason in qknorm_rope._uncovered(call)
    assert launches(OP, given(call), {"is_neox": False}) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(5, 128, dtype=torch.bfloat16), r"q: expected three dimensions .*, got \[5, 128\]"),
        (
            1,
            torch.zeros(4, 2, 128, dtype=torch.bfloat16),
            r"k: expected shape \[5, k heads, 128\], as q, got \[4, 2, 128\]",
        ),
        (1, torch.zeros(5, 2, 128), r"k: expected dtype torch.bfloat16, as q, got torch.float32"),
        (2, torch.zeros(64), r"q_weight: expected shape \[128\], got \[64\]"),
        (4, torch.zeros(9, 130), r"rope_dim: expected an even number from 2 to head_dim 128, got 130"),
        (4, torch.zeros(9, 63), r"rope_dim: expected an even number from 2 to head_dim 128, got 63"),
        (4, torch.zeros(9), r"cos_sin_cache: expected two dimensions .*, got \[9\]"),
        (5, torch.zeros(5, dtype=torch.int16), r"positions: expected dtype int32 or int64, got torch.int16"),
        (5, torch.arange(4), r"positions: expected shape \[5\], one per token, got \[4\]"),
    ],
)
def test_meaningless_tensors_are_named(position, value, message):
    tensors = make()
    tensors[position] = value
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope(*tensors, is_neox=False)
    with pytest.raises(ValueError, match=message):
        why_not(OP, *tensors, is_neox=False)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"head_dim": 64}, "head_dim: expected 0 or q's last size 128, got 64"),
        ({"rope_dim": 64}, "rope_dim: expected 0 or the width 128 of cos_sin_cache, got 64"),
    ],
)
def test_meaningless_scalars_are_named(scalars, message):
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope(*make(), is_neox=False, **scalars)


# --- how calls become launches


@pytest.mark.parametrize(
    ("heads", "tile", "most", "tiles"), [(24, 8, 4, 3), (32, 8, 3, 2), (30, 8, 1, 1), (1, 8, 4, 1), (0, 8, 4, 1)]
)
def test_tiles_are_even(heads, tile, most, tiles):
    # 4 warps hold 8 heads of 128 at 8 elements a thread.
    with qknorm_rope.TUNED.forced(qknorm_rope.Config(4, most)):
        launch = qknorm_rope.plan(qknorm_rope.Call(*make(q_heads=heads, k_heads=0, device="meta"), is_neox=False))
    assert (launch.constexprs["HEADS"], launch.constexprs["TILES"]) == (tile, tiles)


def test_every_token_and_head_has_a_program():
    tensors = [tensor.to("meta") for tensor in make(tokens=7, q_heads=30, k_heads=4)]
    (launch,) = launches(OP, given(qknorm_rope.Call(*tensors, is_neox=False)), {"is_neox": False})
    heads = launch.constexprs["HEADS"] * launch.constexprs["TILES"]
    assert launch.grid == (7 * (-(-30 // heads) + -(-4 // heads)), 1, 1)
