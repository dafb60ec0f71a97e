"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager, primary
from ..bench import grid
from ..solution import fused_gelu_tanh_cat, gelu_tanh_cat, launches
from .cases import OP, assert_right, every, make, normal

# --- the plain path and the other arms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("leading", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_plain_path(leading, dtype):
    assert_right(*make(leading, dtype=dtype))
    assert_right(*make(leading, dtype=dtype, packed=96))


@pytest.mark.parametrize("arm", [primary, eager])
@pytest.mark.parametrize("packed", [0, 96])
def test_arms_of_pytorch(arm, packed):
    assert_right(*make(dtype=torch.float32, packed=packed), op=arm.fused_gelu_tanh_cat)


@pytest.mark.parametrize(("attn", "mlp"), [(0, 8), (8, 0), (0, 0)])
def test_a_part_without_columns(attn, mlp):
    assert_right(*make(attn=attn, mlp=mlp))


# --- what the kernel does not cover


def transposed(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


ATTN, MLP = make()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mlp": transposed(MLP)}, "mlp has stride 5 in its last dimension|mlp has strides"),
        ({"attn": transposed(ATTN)}, "attn has stride"),
        ({"attn": normal(2, 9, 96)[:, :5]}, r"attn has strides \(864, 96, 1\): its rows are not evenly spaced"),
        ({"mlp": normal(5, 2, 200).transpose(0, 1)}, "mlp has strides .* not evenly spaced"),
        ({"attn": ATTN.double(), "mlp": MLP.double()}, "attn has dtype torch.float64"),
        ({"mlp": torch.nn.Parameter(MLP)}, "mlp requires gradients"),
        ({"mlp": normal(2, 5, 0)}, "mlp has no elements"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    inputs = {"attn": ATTN, "mlp": MLP} | change
    assert re.search(reason, gelu_tanh_cat._uncovered(gelu_tanh_cat.Call(**inputs)))
    assert launches(OP, inputs, {}) == []
    with torch.no_grad():
        assert_right(**inputs)


# --- what has no meaning


@pytest.mark.parametrize(
    ("attn", "mlp", "message"),
    [
        (normal(2, 5, 96), normal(2, 4, 96), r"mlp: expected shape \[2, 5, M\], as attn, got \[2, 4, 96\]"),
        (normal(2, 5, 96), normal(5, 96), r"mlp: expected shape \[2, 5, M\], as attn, got \[5, 96\]"),
        (normal(2, 5, 96), normal(2, 5, 96).half(), "mlp: expected dtype torch.bfloat16, as attn, got torch.float16"),
        (normal(1)[0], normal(1)[0], r"attn: expected one dimension \[..., A\] or more, got \[\]"),
    ],
)
def test_meaningless_arguments_are_named(attn, mlp, message):
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        fused_gelu_tanh_cat(attn, mlp)


# --- how calls become launches


@pytest.mark.parametrize(
    ("width", "most", "tiles", "programs"),
    [(3072, 4, 3, 1), (12288, 4, 4, 3), (12288, 5, 4, 3), (100, 4, 1, 1), (1025, 1, 1, 2)],
)
def test_tiles_are_shared_evenly(width, most, tiles, programs):
    part = gelu_tanh_cat.cut(torch.empty(2, 3, width, device="meta"), 1024, most)
    assert part == (width, width, tiles, programs)


def test_mlp_is_read_where_it_lies():
    mlp = torch.empty(2, 27085, 21504, device="meta")[..., 9216:]
    assert gelu_tanh_cat.cut(mlp, 1024, 4).stride == 21504


def test_every_row_and_column_has_a_program():
    for row in grid.thin(grid.grid()):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
        constants = launch.constexprs
        rows = row.inputs["attn"].shape[:-1]
        programs = sum(constants[part].programs for part in ("ATTN", "MLP"))
        assert launch.grid == (-(-torch.Size(rows).numel() // constants["ROWS"]) * programs, 1, 1)
        for part in (constants["ATTN"], constants["MLP"]):
            assert part.programs * part.tiles * constants["COLS"] >= part.width


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("library", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_every_number_has_pytorchs_bits(self, dtype, library):
        numbers = every(dtype).cuda()
        with gelu_tanh_cat.TUNED.forced(gelu_tanh_cat.Config(4, library=library)):
            got = fused_gelu_tanh_cat(numbers, numbers)
        want = primary.fused_gelu_tanh_cat(numbers, numbers)
        known = ~want.isnan()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))

    @pytest.mark.parametrize("library", [False, True])
    def test_float32_has_pytorchs_bits(self, library):
        spread = torch.randn(1 << 24, device="cuda") * torch.exp2(torch.empty(1 << 24, device="cuda").uniform_(-30, 5))
        numbers = spread.view(1 << 12, -1)
        with gelu_tanh_cat.TUNED.forced(gelu_tanh_cat.Config(4, library=library)):
            got = fused_gelu_tanh_cat(numbers, numbers)
        assert torch.equal(got.view(torch.int32), primary.fused_gelu_tanh_cat(numbers, numbers).view(torch.int32))

    def test_bits_of_the_packed_form(self):
        attn, mlp = make((1, 1055), 3072, 12288, packed=9216, device="cuda")
        assert torch.equal(fused_gelu_tanh_cat(attn, mlp), primary.fused_gelu_tanh_cat(attn, mlp))
