"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager
from ..bench import grid
from ..solution import launches, qkv_norm_rope_pack, qkv_pack
from .cases import OP, assert_matches, make

# --- the plain path and the eager arm


def widened(tensors):
    """With float64 heads, tables in float64 too, as the oracle has them."""
    if tensors["q"].dtype == torch.float64:
        tensors |= {name: tensors[name].double() for name in ("cos", "sin") if tensors[name] is not None}
    return tensors


@pytest.mark.parametrize("form", ["tables", "cache", "none"])
@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_plain_path(rows, form, dtype):
    assert_matches(qkv_norm_rope_pack, widened(make(rows=rows, form=form, dtype=dtype, batch=2)))


@pytest.mark.parametrize("layout", ["", "packed", "mlp"])
@pytest.mark.parametrize(("rows", "form"), [(None, "cache"), (3, "tables"), (None, "none")])
def test_eager_arm(layout, rows, form):
    assert_matches(eager.qkv_norm_rope_pack, make(layout=layout, rows=rows, form=form))


def test_no_tokens():
    tensors = make()
    assert qkv_norm_rope_pack(**tensors | {name: tensors[name][:, :0] for name in ("q", "k", "v")}).shape[2] == 0


def test_out_on_the_plain_path():
    tensors, joint = make(), torch.zeros(3, 1, 8, 6, 128, dtype=torch.bfloat16)
    out = joint[:, :, 3:]
    assert qkv_norm_rope_pack(**tensors, out=out) is out
    assert torch.equal(joint[:, :, 3:], qkv_norm_rope_pack(**tensors))
    assert not joint[:, :, :3].any()


# --- what the kernel does not cover


TENSORS = make()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": TENSORS["k"].transpose(2, 3).contiguous().transpose(2, 3)}, "k has stride 6 in its last dimension"),
        ({name: TENSORS[name].float() for name in ("q", "k", "v")}, "q has dtype torch.float32"),
        ({"k_weight": torch.nn.Parameter(TENSORS["k_weight"])}, "k_weight requires gradients"),
        (make(dim=96), "head_dim is 96"),
        ({"out": torch.zeros(3, 1, 1, 6, 128).bfloat16().expand(3, 1, 5, 6, 128)}, "out has stride 0"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    inputs = {**TENSORS, **change}
    assert reason in qkv_pack._uncovered(qkv_pack.Call(**{"out": None, **inputs}))
    assert launches(OP, inputs, {}) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 6, 128).bfloat16()}, r"q: expected four dimensions .*, got \[5, 6, 128\]"),
        ({"k": TENSORS["k"][:, :4]}, r"k: expected shape \[1, 5, 6, 128\], as q, got \[1, 4, 6, 128\]"),
        ({"v": TENSORS["v"].half()}, "v: expected dtype torch.bfloat16, as q, got torch.float16"),
        ({"q_weight": torch.zeros(64)}, r"q_weight: expected shape \[128\], got \[64\]"),
        ({"sin": None}, r"cos: expected shape \[rows, 128\], got \[5, 64\]"),
        ({"cos": None}, "cos: expected a tensor, since sin is one, got None"),
        ({"sin": TENSORS["sin"][:4]}, r"sin: expected shape \[5, 64\], as cos, got \[4, 64\]"),
        ({"out": TENSORS["q"]}, r"out: expected shape \[3, 1, 5, 6, 128\], got \[1, 5, 6, 128\]"),
        ({"out": torch.zeros(3, 1, 5, 6, 128)}, "out: expected dtype torch.bfloat16, as q, got torch.float32"),
    ],
)
def test_meaningless_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        qkv_norm_rope_pack(**{**TENSORS, **change})


# --- how calls become launches


@pytest.mark.parametrize(
    ("heads", "most", "tiles", "parts"), [(24, 4, 3, 1), (32, 3, 2, 2), (30, 1, 1, 4), (1, 4, 1, 1), (9, 3, 2, 1)]
)
def test_tiles_are_even(heads, most, tiles, parts):
    # 4 warps hold 8 heads of 128 at 8 elements a thread.
    with qkv_pack.TUNED.forced(qkv_pack.Config(4, most)):
        launch = qkv_pack.plan(qkv_pack.Call(None, **make(heads=heads, device="meta")))
    assert [launch.constexprs[name] for name in ("HEADS", "TILES", "PARTS")] == [8, tiles, parts]
    assert launch.grid == (5 * 3 * parts, 1, 1)


def test_every_token_and_head_has_a_program():
    for row in grid.thin(grid.grid()):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
        batch, tokens, heads, _ = row.inputs["q"].shape
        constants = launch.constexprs
        assert constants["PARTS"] * constants["TILES"] * constants["HEADS"] >= heads
        assert launch.grid == (batch * tokens * 3 * constants["PARTS"], 1, 1)


def test_the_number_of_tokens_compiles_nothing_anew():
    """A prompt's length changes from request to request."""
    one, other = (
        qkv_pack.plan(qkv_pack.Call(None, **make(n, layout="mlp", device="meta"))).constexprs for n in (27, 51)
    )
    assert one == other
