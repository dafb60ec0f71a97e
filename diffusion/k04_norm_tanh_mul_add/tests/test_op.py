"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re

import pytest
import torch

from kda_runtime import norm_rows
from kda_tools.lab.inspect.aot import meta_tensors

from .. import solution
from ..baseline import eager
from ..bench import grid
from ..solution import launches, why_not
from ..solution import norm_tanh_mul_add as module
from .cases import BOTH, DOUBLE, assert_right, make, name_of, normal

ops = pytest.mark.parametrize("double", [False, True])
norms = pytest.mark.parametrize("norm", ["layer", "rms"])


def public(tensors, arm=solution):
    return getattr(arm, name_of(tensors))


# --- the plain path and the eager arm


@ops
@norms
@pytest.mark.parametrize("affine", [BOTH, ("weight",), ("bias",), ()])
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager(arm, affine, norm, double):
    tensors = make(affine=affine, double=double)
    assert_right(public(tensors, arm), tensors, norm)


@pytest.mark.parametrize("shape", [(1,), (256,), (2, 256), (1, 6, 256), (2, 6, 256), (2, 3, 1, 256)], ids=str)
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager_operands(arm, shape):
    tensors = make(double=True, scale=shape, shift=shape, scale2=shape, operands=torch.float32)
    assert_right(public(tensors, arm), tensors, "layer")


# --- what the kernels do not cover


def swapped(tensor):
    """The same shape and values, with batches next to each other in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": swapped(normal(2, 6, 256))}, r"x has shape \[2, 6, 256\] and strides \(256, 512, 1\)"),
        ({"x": normal(4, 6, 256)[::2]}, "x has shape .* steps evenly"),
        ({"x": normal(2, 1, 256).expand(2, 6, 256)}, "x has shape .* steps evenly"),
        ({"scale": torch.nn.Parameter(normal(1, 1, 256))}, "scale requires gradients"),
        ({"shift": swapped(normal(2, 6, 256))}, "shift has shape .* no form"),
        ({"scale2": normal(3, 6, 256)[::2]}, "scale2 has shape .* no form"),
        ({"weight": torch._neg_view(normal(256))}, "weight is a negated"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    tensors = make(double=True) | change
    assert re.search(reason, norm_rows.uncovered(module.Call(*tensors.values(), "rms", 1e-5)))
    assert launches(DOUBLE, tensors, {"norm_type": "rms"}) == []
    with torch.no_grad():
        assert_right(public(tensors), tensors)


# --- what has no meaning


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", normal(6, 256), r"x: expected three dimensions \[B, S, D\], got \[6, 256\]"),
        ("x", normal(2, 6, 128), "x: expected D a multiple of 256 up to 8192, got 128"),
        ("x", normal(2, 6, 8448), "x: expected D a multiple of 256 up to 8192, got 8448"),
        ("x", normal(2, 6, 0), "x: expected D a multiple of 256 up to 8192, got 0"),
        ("x", normal(2, 6, 256).double(), "x: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ("x", normal(2, 6, 512)[..., ::2], "x: expected stride 1 in its last dimension, got 2"),
        ("weight", normal(512), r"weight: expected shape \[256\], got \[512\]"),
        ("bias", normal(1, 256), r"bias: expected shape \[256\], got \[1, 256\]"),
        ("weight2", normal(512)[::2], "weight2: expected stride 1 in its last dimension, got 2"),
        ("bias2", normal(256).double(), "bias2: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ("scale", normal(3, 256), r"scale: expected a shape that broadcasts to \[2, 256\], got \[3, 256\]"),
        ("scale", normal(2, 6, 128), r"scale: expected a shape that broadcasts to \[2, 6, 256\], got \[2, 6, 128\]"),
        ("shift", normal(2, 4, 1, 256), "shift: expected frames that divide the 6 tokens of x, got 4"),
        ("shift", normal(2, 3, 2, 256), r"shift: expected a shape that broadcasts to \[2, 3, 1, 256\], got"),
        ("scale2", normal(1, 1, 1, 1, 256), "scale2: expected at most four dimensions, got"),
        ("scale2", None, "scale2: expected a tensor, got None"),
        ("shift", normal(1, 1, 1).expand(1, 1, 256), "shift: expected stride 1 in its last dimension, got 0"),
        ("norm_type", "batch", "norm_type: expected 'layer' or 'rms', got 'batch'"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    arguments = make(double=True) | {"norm_type": "rms"} | {argument: value}
    with pytest.raises(ValueError, match=f"{DOUBLE}: {message}"):
        solution.fused_norm_tanh_mul_add_norm_scale(**arguments)
    with pytest.raises(ValueError, match=f"{DOUBLE}: {message}"):
        why_not(DOUBLE, **arguments)


# --- how calls become launches


@pytest.mark.parametrize(
    ("warps", "rows", "columns", "item", "cut"),
    [
        (4, 1, 3840, 2, (4, 1, 1024)),
        (8, 1, 3840, 2, (8, 1, 2048)),
        (8, 2, 3840, 2, (8, 2, 2048)),
        (4, 2, 3840, 2, (8, 2, 2048)),
        (4, 1, 8192, 2, (8, 1, 2048)),
        (4, 1, 8192, 4, (8, 1, 1024)),
        (4, 4, 8192, 2, (16, 2, 4096)),
        (4, 1, 256, 2, (1, 1, 256)),
        (4, 1, 256, 4, (2, 1, 256)),
        (4, 4, 256, 2, (1, 4, 256)),
    ],
)
def test_cuts_fit_the_registers(warps, rows, columns, item, cut):
    assert module.cut(module.Config(warps, rows=rows), columns, item) == cut


def test_every_row_has_a_program():
    for config in (module.Config(4), module.Config(4, rows=4)):
        with module.TUNED.forced(config):
            for row in grid.thin(grid.grid()):
                (launch,) = launches(row.op, meta_tensors(row), row.scalars)
                batch, tokens, _ = row.inputs["x"].shape
                constants = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | dict(launch.constexprs)
                assert launch.grid == (-(-batch * tokens // constants["ROWS"]), 1, 1)
                # Rows are masked exactly where the last program is not full.
                assert constants["rows"] == (batch * tokens if batch * tokens % constants["ROWS"] else None)


def test_features_of_the_table():
    (row,) = (row for row in grid.grid() if row.id.startswith("double-rms-4x512x3072-BSD-BSD-float16"))
    with module.TUNED.forced(module.Config(4)) as asked:
        launches(row.op, meta_tensors(row), row.scalars)
    assert asked == [{"outputs": 2, "width": 3072, "bytes": 4 * 512 * 3072 * 2}]


@pytest.mark.parametrize(
    ("maxnreg", "early", "shape", "limited"),
    [
        (96, 1, {}, True),  # 4 chunks of 16 bytes each of x, weight, scale and shift, and 128
        (88, 1, {}, False),
        (0, 1, {}, False),
        (96, 1, {"affine": BOTH}, False),  # a bias as well
        (96, 1, {"dtype": torch.float16}, False),  # an exact tanh
        (96, 1, {"double": True}, True),
        (96, 2, {"double": True}, False),
        (128, 2, {"double": True}, True),
    ],
)
def test_registers_are_limited_to_what_holds_the_loads(maxnreg, early, shape, limited):
    tensors = make(columns=3840, device="meta", **{"affine": ("weight",)} | shape)
    norm = "layer" if "affine" in shape else "rms"
    with module.TUNED.forced(module.Config(4, early=early, maxnreg=maxnreg)):
        (launch,) = launches(name_of(tensors), tensors, {"norm_type": norm})
    assert launch.options.get("maxnreg") == (maxnreg if limited else None)


@pytest.mark.parametrize(("dtype", "early"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_both_norms_are_early_where_the_registers_hold_them(dtype, early):
    tensors = make(columns=3840, device="meta", double=True, dtype=dtype)
    with module.TUNED.forced(module.Config(4, early=2)):
        (launch,) = launches(name_of(tensors), tensors, {"norm_type": "layer"})
    assert launch.constexprs["EARLY"] == early


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_eps_and_norm_are_part_of_the_signature(self):
        tensors = make(device="cuda")
        for norm, eps in (("rms", 1e-5), ("layer", 1e-5), ("rms", 0.5), ("rms", 1e-5)):
            assert_right(public(tensors), tensors, norm, eps)

    def test_approximate_tanh_moves_few_outputs_and_those_by_a_step(self):
        tensors = make(affine=(), columns=8192, device="cuda", shift=(1,))
        tensors["shift"].zero_()
        with module.TUNED.forced(module.Config(4, approximate=False)):
            exact = public(tensors)(**tensors, norm_type="rms")
        with module.TUNED.forced(module.Config(4, approximate=True)):
            close = public(tensors)(**tensors, norm_type="rms")
        torch.testing.assert_close(close, exact, atol=0, rtol=2**-7)
        assert 0 < (close != exact).float().mean() < 0.25

    def test_offsets_beyond_32_bits(self):
        tokens = 2**31 // 8192 + 9
        x = torch.empty(1, tokens, 8192, dtype=torch.bfloat16, device="cuda")
        x[:, -3:] = normal(1, 3, 8192)
        scale, shift = normal(8192, device="cuda"), normal(8192, device="cuda", seed=1)
        y = solution.fused_norm_tanh_mul_add(x, None, None, scale, shift, "layer")
        last = x[:, -3:].contiguous()
        assert torch.equal(y[:, -3:], solution.fused_norm_tanh_mul_add(last, None, None, scale, shift, "layer"))
