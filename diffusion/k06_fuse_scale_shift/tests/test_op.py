"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from .. import solution
from ..baseline import eager
from ..bench import grid, reference
from ..solution import fuse_scale_shift_kernel, launches, scale_shift, select01, why_not
from .cases import (
    RESIDUAL_SELECT01,
    SCALE_SHIFT,
    SELECT01,
    assert_scale_shift,
    assert_select01,
    make_scale_shift,
    make_select01,
    name_of,
    normal,
)

both = pytest.mark.parametrize("residual", [False, True])


def public(tensors):
    return getattr(solution, name_of(tensors))


# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [(), (96,), (2, 96), (1, 1, 96), (2, 6, 1), (2, 3, 1, 96), (1, 3, 1, 96)], ids=str)
def test_plain_scale_shift(scale, dtype):
    assert_scale_shift(fuse_scale_shift_kernel, make_scale_shift(scale=scale, dtype=dtype), scale_constant=1.0)


@pytest.mark.parametrize("arm", [fuse_scale_shift_kernel, eager.fuse_scale_shift_kernel])
def test_two_zero_scalars_leave_x_alone(arm):
    x, zero = normal(2, 6, 96), torch.zeros((), dtype=torch.bfloat16)
    y = arm(x, zero, zero.reshape(1), 0.0)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    assert_scale_shift(arm, [x, zero + 2, zero], scale_constant=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [(2, 96), (1, 1, 96), (2, 6, 96), (2, 3, 1, 96)], ids=str)
def test_exact_has_the_bits_of_the_eager_chain_where_no_kernel_runs(scale, dtype):
    tensors = make_scale_shift(scale=scale, dtype=dtype)
    want = eager.fuse_scale_shift_kernel(*tensors)
    assert not torch.equal(fuse_scale_shift_kernel(*tensors), want)
    scale_shift.OP.set_exact()
    try:
        assert torch.equal(fuse_scale_shift_kernel(*tensors), want)
        assert torch.equal(torch.compile(fuse_scale_shift_kernel, backend="eager", fullgraph=True)(*tensors), want)
        (launch,) = launches(SCALE_SHIFT, dict(zip(("x", "scale", "shift"), tensors, strict=True)), {})
    finally:
        scale_shift.OP.set_exact(False)
    assert launch.constexprs["EXACT"]


def test_select01_has_no_exact_mode():
    with pytest.raises(ValueError, match=rf"^{SELECT01}: expected an op with an exact mode; docs/dispatch.md says why"):
        select01.SELECT01.set_exact()


@pytest.mark.parametrize("scale", [(), (2, 96), (1, 1, 96), (2, 6, 96), (2, 3, 1, 96)], ids=str)
def test_eager_scale_shift(scale):
    tensors = make_scale_shift(scale=scale, dtype=torch.float32)
    assert_scale_shift(eager.fuse_scale_shift_kernel, tensors, scale_constant=1.0)


@both
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager_select01(arm, affine, residual):
    tensors = make_select01(residual=residual, affine=affine, strided=True)
    assert_select01(getattr(arm, name_of(tensors)), tensors)


def test_plain_path_returns_contiguous_tensors():
    x, scale, shift = make_scale_shift()
    assert fuse_scale_shift_kernel(x.transpose(1, 2).contiguous().transpose(1, 2), scale, shift).is_contiguous()


# --- what the kernels do not cover


def transposed(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": transposed(normal(2, 6, 96))}, "x is not contiguous"),
        ({"x": normal(2, 6, 96, dtype=torch.float64)}, "x has dtype torch.float64"),
        ({"shift": normal(2, 6, 96, dtype=torch.float64)}, "shift has dtype torch.float64"),
        ({"scale": torch.nn.Parameter(normal(2, 96))}, "scale requires gradients"),
        ({"scale": transposed(normal(2, 6, 96))}, r"scale has shape \[2, 6, 96\] and strides .*no form"),
        ({"scale": normal(3, 6, 96)[::2]}, r"scale .* no form"),
        ({"scale": normal(1, 3, 1, 96)}, r"scale .* no form"),
    ],
)
def test_what_scale_shift_does_not_cover(change, reason):
    inputs = dict(zip(("x", "scale", "shift"), make_scale_shift(), strict=True)) | change
    call = scale_shift.Call(**inputs, scale_constant=1.0)
    assert re.search(reason, scale_shift._uncovered(call))
    assert launches(SCALE_SHIFT, inputs, {"scale_constant": 1}) == []
    with torch.no_grad():
        assert_scale_shift(fuse_scale_shift_kernel, list(inputs.values()), scale_constant=1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": transposed(normal(2, 5, 96))}, "x is not contiguous"),
        ({"residual": transposed(normal(2, 5, 96))}, "residual is not contiguous"),
        ({"residual_gate": normal(2, 5, 96, dtype=torch.float64)}, "residual_gate has dtype torch.float64"),
        ({"shift1": transposed(normal(2, 96))}, "shift1 has stride 2"),
        ({"gate1": normal(2, 96, dtype=torch.float32)}, "gate1 has dtype torch.float32, gate0 another"),
        ({"weight": normal(96, 2)[:, 0]}, "weight has stride 2"),
        ({"bias": torch.nn.Parameter(normal(96))}, "bias requires gradients"),
        ({"index": transposed(torch.ones(2, 5, dtype=torch.int32))}, "index has strides"),
    ],
)
def test_what_select01_does_not_cover(change, reason):
    inputs = make_select01(residual=True) | change
    call = select01.Call(**inputs, eps=1e-6)
    assert reason in select01._uncovered(call)
    assert launches(RESIDUAL_SELECT01, inputs, {"eps": 1e-6}) == []
    with torch.no_grad():
        assert_select01(public(inputs), inputs)


def test_a_whole_shift_with_gaps_beside_frames_is_copied():
    x, scale, shift = make_scale_shift(scale=(2, 3, 1, 96))
    other = transposed(shift.view(12, 96))
    assert "only a copy" in scale_shift._uncovered(scale_shift.Call(x, scale, other, 1.0))
    assert torch.equal(fuse_scale_shift_kernel(x, scale, other), fuse_scale_shift_kernel(x, scale, shift))


def test_rows_beyond_the_envelope():
    row = torch.empty(1, 1, 32769, dtype=torch.bfloat16, device="meta")
    tensors = dict.fromkeys(reference.MODULATION, row[0]) | {"x": row, "index": torch.ones(1, 1, device="meta").bool()}
    assert launches(SELECT01, tensors, {"eps": 1e-6}) == []
    assert launches(SELECT01, {name: t[..., :32768] for name, t in tensors.items()}, {"eps": 1e-6}) != []


def test_why_not_takes_upstreams_tiles():
    tensors = make_scale_shift()
    assert why_not(SCALE_SHIFT, *tensors, 1.0, 128, block_c=128) == why_not(SCALE_SHIFT, *tensors)
    assert why_not(SCALE_SHIFT, *tensors, 1.0, 128, 128) == why_not(SCALE_SHIFT, *tensors)


# --- what has no meaning


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, normal(6, 96), r"x: expected three dimensions \[B, L, C\], got \[6, 96\]"),
        (1, normal(3, 96), r"scale: expected a shape that broadcasts to \[2, 96\], got \[3, 96\]"),
        (1, normal(95), r"scale: expected a shape that broadcasts to \[96\], got \[95\]"),
        (1, normal(2, 5, 96), r"scale: expected a shape that broadcasts to \[2, 6, 96\], got \[2, 5, 96\]"),
        (1, normal(2, 4, 1, 96), r"scale: expected frames that divide the 6 tokens of x, got 4"),
        (1, normal(2, 3, 2, 96), r"scale: expected a shape that broadcasts to \[2, 3, 1, 96\], got \[2, 3, 2, 96\]"),
        (2, normal(1, 1, 1, 1, 96), r"shift: expected at most four dimensions, got \[1, 1, 1, 1, 96\]"),
    ],
)
def test_meaningless_operands_are_named(position, value, message):
    tensors = make_scale_shift()
    tensors[position] = value
    with pytest.raises(ValueError, match=f"{SCALE_SHIFT}: {message}"):
        fuse_scale_shift_kernel(*tensors)
    with pytest.raises(ValueError, match=message):
        why_not(SCALE_SHIFT, *tensors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", normal(5, 96), r"x: expected three dimensions \[B, L, C\], got \[5, 96\]"),
        ("residual", normal(2, 4, 96), r"residual: expected shape \[2, 5, 96\], got \[2, 4, 96\]"),
        ("residual", None, "residual: expected a tensor, got None"),
        ("residual_gate", None, "residual_gate: expected a tensor, got None"),
        ("weight", normal(95), r"weight: expected shape \[96\], got \[95\]"),
        ("scale0", normal(1, 96), r"scale0: expected shape \[2, 96\], got \[1, 96\]"),
        ("index", torch.ones(10, dtype=torch.int64), r"index: expected shape \[2, 5\], got \[10\]"),
    ],
)
def test_meaningless_select01_arguments_are_named(name, value, message):
    tensors = make_select01(residual=True) | {name: value}
    with pytest.raises(ValueError, match=f"{RESIDUAL_SELECT01}: {message}"):
        public(tensors)(**tensors, eps=1e-6)


# --- how calls become launches


def test_the_strided_production_row_is_read_where_it_lies():
    scale = torch.empty(1, 18144, 6, 3072, device="meta")[:, :, 1]
    assert scale_shift.placed(scale, 1, 18144) == (("rows", 18432, True), None)


@pytest.mark.parametrize(
    ("rows", "channels", "item", "block"),
    [
        (1, 3072, 2, (1, 1024)),
        (4, 3072, 2, (4, 1024)),
        (4, 512, 2, (8, 512)),
        (1, 3072, 4, (1, 512)),
        (1, 1, 2, (1024, 1)),
    ],
)
def test_blocks_of_scale_shift_leave_no_thread_idle(rows, channels, item, block):
    assert scale_shift.block(scale_shift.Config(4, rows=rows), channels, item) == block


@pytest.mark.parametrize(
    ("warps", "rows", "channels", "block"),
    [
        (4, 1, 3072, (4, 1, 1024)),
        (4, 4, 3072, (4, 4, 256)),
        (8, 2, 3072, (8, 2, 1024)),
        (4, 1, 512, (2, 1, 512)),
        (4, 4, 8192, (8, 1, 2048)),
        (4, 1, 32768, (16, 1, 4096)),
    ],
)
def test_blocks_of_select01_fit_the_registers(warps, rows, channels, block):
    assert select01.block(select01.Config(warps, rows=rows), channels, 2) == block


def test_every_row_and_channel_has_a_program():
    for row in grid.thin(grid.grid()):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
        batch, tokens, channels = row.inputs["x"].shape
        constants = launch.constexprs
        parts = -(-channels // constants["COLS"]) if row.op == SCALE_SHIFT else 1
        assert launch.grid == (-(-batch * tokens // constants["ROWS"]) * parts, 1, 1)


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_weight_may_come_and_go(self):
        for affine in (True, False, True):
            tensors = make_select01(affine=affine, device="cuda")
            assert_select01(public(tensors), tensors)

    @pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, 2.0), (3.0, 0.0)])
    def test_two_scalars_in_a_cuda_graph_follow_their_values(self, values):
        x = normal(1, 6, 96, device="cuda")
        scale, shift = torch.zeros((), device="cuda"), torch.zeros(1, device="cuda")
        fuse_scale_shift_kernel(x, scale, shift, 0.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fuse_scale_shift_kernel(x, scale, shift, 0.0)
        scale.fill_(values[0])
        shift.fill_(values[1])

        def replay(*_, **__):
            graph.replay()
            return y

        assert_scale_shift(replay, [x, scale, shift], scale_constant=0.0)
