"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re
from pathlib import Path

import pytest
import torch

from kda_judge.contract.workloads import load_workloads
from kda_runtime import norm_rows
from kda_tools.lab.inspect.aot import meta_tensors

from .. import solution
from ..baseline import eager
from ..bench import grid
from ..solution import launches, why_not
from ..solution import norm_scale_shift as module
from .cases import BOTH, RESIDUAL, assert_right, make, name_of, normal

WORKLOADS = Path(__file__).parents[1] / "bench" / "workloads.toml"
ops = pytest.mark.parametrize("residual", [False, True])
norms = pytest.mark.parametrize("norm", ["layer", "rms"])


def public(tensors, arm=solution):
    return getattr(arm, name_of(tensors))


# --- the plain path and the eager arm


@ops
@norms
@pytest.mark.parametrize("affine", [BOTH, ("weight",), ("bias",), ()])
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager(arm, affine, norm, residual):
    tensors = make(affine=affine, residual=residual)
    assert_right(public(tensors, arm), tensors, norm)


@pytest.mark.parametrize("shape", [(1,), (256,), (2, 256), (1, 6, 256), (2, 6, 256), (2, 3, 1, 256)], ids=str)
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager_operands(arm, shape):
    tensors = make(residual=True, gate=shape, scale=shape, shift=shape, operands=torch.float32)
    assert_right(public(tensors, arm), tensors, "layer")


@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager_without_a_gate(arm):
    tensors = make(residual=True, gate=None)
    assert_right(public(tensors, arm), tensors, "layer")


# --- what the kernels do not cover


def swapped(tensor):
    """The same shape and values, with batches next to each other in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": swapped(normal(2, 6, 256))}, r"x has shape .* and strides \(256, 512, 1\); the kernel steps evenly"),
        ({"x": normal(4, 6, 256)[::2]}, "x has shape .* steps evenly"),
        ({"residual": normal(4, 6, 256)[::2]}, "residual has shape .* steps evenly"),
        (
            {"x": swapped(normal(2, 1, 6 * 256).view(2, 1, 6 * 256))[..., :256].expand(2, 6, 256)},
            "x has shape .* steps evenly",
        ),
        ({"gate": torch.nn.Parameter(normal(1, 1, 256))}, "gate requires gradients"),
        ({"shift": swapped(normal(2, 6, 256))}, "shift has shape .* no form"),
        ({"gate": normal(3, 6, 256)[::2]}, "gate has shape .* no form"),
        ({"weight": torch._neg_view(normal(256))}, "weight is a negated"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    tensors = make(residual=True) | change
    assert re.search(reason, norm_rows.uncovered(module.Call(*tensors.values(), "rms", 1e-5)))
    assert launches(RESIDUAL, tensors, {"norm_type": "rms"}) == []
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
        ("residual", normal(2, 5, 256), r"residual: expected shape \[2, 6, 256\], got \[2, 5, 256\]"),
        ("residual", None, "residual: expected a tensor, got None"),
        ("weight", normal(512), r"weight: expected shape \[256\], got \[512\]"),
        ("bias", normal(1, 256), r"bias: expected shape \[256\], got \[1, 256\]"),
        ("weight", normal(512)[::2], "weight: expected stride 1 in its last dimension, got 2"),
        ("bias", normal(256).double(), "bias: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ("gate", 1, "gate: expected a tensor, got 1"),
        ("gate", normal(3, 1, 256), r"gate: expected a shape that broadcasts to \[2, 6, 256\], got \[3, 1, 256\]"),
        ("scale", normal(3, 256), r"scale: expected a shape that broadcasts to \[2, 256\], got \[3, 256\]"),
        ("scale", normal(2, 6, 128), r"scale: expected a shape that broadcasts to \[2, 6, 256\], got \[2, 6, 128\]"),
        ("scale", None, "scale: expected a tensor, got None"),
        ("shift", normal(2, 4, 1, 256), "shift: expected frames that divide the 6 tokens of x, got 4"),
        ("shift", normal(2, 3, 2, 256), r"shift: expected a shape that broadcasts to \[2, 3, 1, 256\], got"),
        ("gate", normal(1, 1, 1, 1, 256), "gate: expected at most four dimensions, got"),
        ("shift", normal(1, 1, 1).expand(1, 1, 256), "shift: expected stride 1 in its last dimension, got 0"),
        ("norm_type", "batch", "norm_type: expected 'layer' or 'rms', got 'batch'"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    arguments = make(residual=True) | {"norm_type": "rms"} | {argument: value}
    with pytest.raises(ValueError, match=f"{RESIDUAL}: {message}"):
        solution.fused_scale_residual_norm_scale_shift(**arguments)
    with pytest.raises(ValueError, match=f"{RESIDUAL}: {message}"):
        why_not(RESIDUAL, **arguments)


# --- how calls become launches


@pytest.mark.parametrize(
    ("config", "columns", "item", "cut"),
    [
        (module.Config(4), 3072, 2, (4, 1, 1024)),
        (module.Config(8), 3072, 2, (4, 1, 1024)),
        (module.Config(8, whole=False), 3072, 2, (8, 1, 2048)),
        (module.Config(8), 4096, 2, (8, 1, 2048)),
        (module.Config(4), 5120, 2, (4, 1, 1024)),
        (module.Config(4), 5120, 4, (4, 1, 512)),
        (module.Config(8), 1536, 2, (2, 1, 512)),
        (module.Config(4), 7936, 2, (8, 1, 2048)),
        (module.Config(4), 8192, 2, (8, 1, 2048)),
        (module.Config(8, rows=2), 3072, 2, (4, 2, 1024)),
        (module.Config(8, rows=2), 4096, 2, (8, 2, 2048)),
        (module.Config(4, rows=2), 5120, 2, (4, 2, 1024)),
        (module.Config(4, rows=4), 5120, 2, (4, 2, 1024)),
        (module.Config(4, rows=2), 5120, 4, (4, 1, 512)),
        (module.Config(4), 256, 2, (1, 1, 256)),
        (module.Config(4), 256, 4, (2, 1, 256)),
        (module.Config(4, rows=4), 256, 2, (1, 4, 256)),
    ],
)
def test_cuts_are_whole_and_fit_the_registers(config, columns, item, cut):
    assert module.cut(config, columns, item) == cut


def launched(id, config):
    """The launch of a frozen row."""
    (row,) = (row for row in load_workloads(WORKLOADS) if row.id == id)
    with module.TUNED.forced(config):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
    return launch


@pytest.mark.parametrize(
    ("id", "ahead"),
    [
        ("wan-t2v-nss-75600x5120-11D.bf16", 5),  # all: 3 x 80 bytes
        ("wan-ti2v-srnss-18144x3072-gnone-1SD.fp32", 3),  # all: 2 x 48 + 2 x 96 bytes
        ("helios-nss-11040x5120-1SD.fp32", 2),  # 80 bytes, and 64 for each
        ("wan-i2v-srnss-37044x5120-gnone-11D.fp32", 1),  # 160 bytes, and 64 for each
        ("wan-t2v-srnss-37800x5120-g11D.fp32-affine-1.bf16", 1),  # 320 bytes
    ],
)
def test_as_many_chunks_are_loaded_ahead_as_the_registers_hold(id, ahead):
    assert launched(id, module.Config(4)).constexprs["AHEAD"] == ahead
    assert launched(id, module.Config(4, ahead=1)).constexprs["AHEAD"] == 1


@pytest.mark.parametrize(
    ("id", "maxnreg", "limited"),
    [
        ("joyai-edit-nss-997x4096-1D.bf16", 80, True),  # 4 x 48 bytes, and 128
        ("joyai-edit-nss-997x4096-1D.bf16", 72, False),
        ("joyai-edit-nss-997x4096-1D.bf16", 0, False),
        ("helios-nss-11040x5120-1SD.fp32", 80, False),  # 5 x 16 and 2 x 64 bytes
        ("wan-t2v-srnss-37800x5120-g11D.fp32-affine-1.bf16", 96, False),  # 5 x 64 and 64
    ],
)
def test_registers_are_limited_to_what_holds_the_loads(id, maxnreg, limited):
    launch = launched(id, module.Config(4, maxnreg=maxnreg))
    assert launch.options.get("maxnreg") == (maxnreg if limited else None)


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


@pytest.mark.parametrize(
    ("id", "features"),
    [
        ("qwen-nss-19x3072-1D.bf16", {"bytes": 19 * 3072 * 2, "width": 3072, "residual": 0, "streamed": 0}),
        ("helios-nss-11040x5120-1SD.fp32", {"bytes": 11040 * 10240, "width": 5120, "residual": 0, "streamed": 8}),
        (
            "wan-ti2v-srnss-18144x3072-g1SD.fp32-affine-1.bf16",
            {"bytes": 18144 * 6144, "width": 3072, "residual": 1, "streamed": 4},
        ),
    ],
)
def test_features_of_the_table(id, features):
    (row,) = (row for row in load_workloads(WORKLOADS) if row.id == id)
    with module.TUNED.forced(module.Config(4)) as asked:
        launches(row.op, meta_tensors(row), row.scalars)
    assert asked == [features]


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_eps_and_norm_are_part_of_the_signature(self):
        tensors = make(device="cuda")
        for norm, eps in (("rms", 1e-5), ("layer", 1e-5), ("rms", 0.5), ("rms", 1e-5)):
            assert_right(public(tensors), tensors, norm, eps)

    def test_offsets_beyond_32_bits(self):
        tokens = 2**31 // 8192 + 9
        x = torch.empty(1, tokens, 8192, dtype=torch.bfloat16, device="cuda")
        x[:, -3:] = normal(1, 3, 8192)
        scale, shift = normal(8192, device="cuda"), normal(8192, device="cuda", seed=1)
        y = solution.fused_norm_scale_shift(x, None, None, scale, shift, "layer")
        last = x[:, -3:].contiguous()
        assert torch.equal(y[:, -3:], solution.fused_norm_scale_shift(last, None, None, scale, shift, "layer"))
