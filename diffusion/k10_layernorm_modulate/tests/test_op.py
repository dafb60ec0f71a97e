"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager
from ..bench import grid
from ..solution import fused_layernorm_modulate, launches, layernorm_modulate
from .cases import EPS, OP, assert_right, make

# --- the plain path and the arm in PyTorch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [4, 512, 2240])
def test_plain_path(columns, dtype):
    x, scale, shift, eps = make(columns=columns, dtype=dtype)
    assert_right(x, scale, shift, eps)
    assert_right(x, scale, None, eps)
    assert torch.equal(
        fused_layernorm_modulate(x, scale, shift, eps), eager.fused_layernorm_modulate(x, scale, shift, eps)
    )


def test_the_arm_of_pytorch():
    assert_right(*make(), op=eager.fused_layernorm_modulate)


def test_scale_alone_keeps_the_sign_of_zero():
    x = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
    scale = torch.full((1, 512), -3.0, dtype=torch.bfloat16)
    assert bool(fused_layernorm_modulate(x, scale, None, EPS).signbit().all())
    assert not bool(fused_layernorm_modulate(x, scale, torch.zeros_like(scale), EPS).signbit().any())


# --- what the kernel does not cover

X, SCALE, SHIFT, _ = make()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": X.half(), "scale": SCALE.half(), "shift": SHIFT.half()}, "x has dtype torch.float16"),
        ({"x": X[..., :516].contiguous(), "scale": SCALE[:, :516], "shift": SHIFT[:, :516]}, "x has 516 columns"),
        ({"x": X[:, ::2]}, "x is not contiguous"),
        ({"x": X[:, :0]}, "x is empty"),
        ({"scale": SCALE.t().contiguous().t()}, "scale has stride 2 in its last dimension"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    inputs = {"x": X, "scale": SCALE, "shift": SHIFT} | change
    assert re.search(reason, layernorm_modulate._uncovered(layernorm_modulate.Call(**inputs, eps=EPS)))
    assert launches(OP, inputs, {"eps": EPS}) == []
    assert_right(**inputs, eps=EPS)


# --- what has no meaning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x: expected 3 dimensions \[B, S, D\], got \[3, 1024\]"),
        ({"scale": SCALE[:1]}, r"scale: expected shape \[2, 1024\], got \[1, 1024\]"),
        ({"shift": SHIFT[:, :8]}, r"shift: expected shape \[2, 1024\], got \[2, 8\]"),
        ({"shift": SHIFT.float()}, "shift: expected dtype torch.bfloat16, as x, got torch.float32"),
    ],
)
def test_meaningless_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        fused_layernorm_modulate(**({"x": X, "scale": SCALE, "shift": SHIFT} | change), eps=EPS)


# --- how calls become launches


def test_every_row_has_a_warp():
    from ..solution.exact_kernel import Cut  # which imports the DSL

    for row in grid.thin(grid.grid()):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
        batch, tokens, _ = row.inputs["x"].shape
        assert launch.numbers[:2] == (batch * tokens, tokens)
        cut = Cut(*launch.constants)
        least = -(-batch * tokens // cut.rows)
        held = layernorm_modulate.MULTIPROCESSORS * (cut.held // cut.warps)
        assert launch.with_code(b"").grid[0] == (least if cut.following == "once" else min(least, held))


@pytest.mark.parametrize(("chunks", "pad", "aligned"), [(1, 0, True), (6, 0, True), (6, 3, False)])
def test_uneven_gaps_between_the_rows_of_scale_are_read_element_by_element(chunks, pad, aligned):
    wide = torch.empty(2, chunks * 512 + pad, dtype=torch.bfloat16, device="meta")
    inputs = {"x": torch.empty(2, 3, 512, dtype=torch.bfloat16, device="meta"), "scale": wide[:, :512]}
    (launch,) = launches(OP, inputs, {"shift": None, "eps": EPS})
    assert launch.constants[3] is aligned


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("columns", [512, 3072, 6144])
    @pytest.mark.parametrize("form", [{}, {"offset": -200.0, "spread": 0.3}], ids=str)
    def test_bits_are_pytorchs(self, columns, form):
        x, scale, shift, eps = make(2, 257, columns, device="cuda", **form)
        for one in (shift, None):
            want = eager.fused_layernorm_modulate(x, scale, one, eps)
            assert torch.equal(fused_layernorm_modulate(x, scale, one, eps), want)
