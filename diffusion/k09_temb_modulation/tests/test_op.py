"""The ops around their kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re
from pathlib import Path

import pytest
import torch

from kda_judge.contract.workloads import load_workloads
from kda_tools.lab.inspect.aot import meta_tensors

from .. import solution
from ..baseline import eager
from ..bench import grid, reference
from ..solution import launches, why_not
from ..solution import temb_modulation as module
from .cases import BOTH, CALLS, NORM, assert_right, make, normal

WORKLOADS = Path(__file__).parents[1] / "bench" / "workloads.toml"
ROWS = {row.id: row for row in load_workloads(WORKLOADS)}
calls = pytest.mark.parametrize("call", CALLS)


# --- the plain path and the eager arm


@calls
@pytest.mark.parametrize("outer", [(2, 6), (1, 6), (2, 1), (2,), (1,)], ids=str)
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager(arm, outer, call):
    op, arguments = make(call, outer=outer, temb=torch.float32)
    assert_right(getattr(arm, op), op, arguments)


@pytest.mark.parametrize("left", ["weight", "bias"])
@pytest.mark.parametrize("arm", [solution, eager])
def test_plain_and_eager_leave_one_of_weight_and_bias_out(arm, left):
    op, arguments = make("whole", gate=5, shift=3, scale=4)
    assert_right(getattr(arm, op), op, arguments | {left: None})


# --- what upstream's own operations say


@calls
def test_the_oracle_is_the_chain_of_upstreams_block(call):
    """Slices as the block makes them, six at a time; then norm and multiply-add by PyTorch, in float64."""
    op, arguments = make(call, dtype=torch.float32)
    if op == BOTH:
        arguments["gate"] = 5
    x, temb = arguments["x"].double(), arguments["temb"]

    def block(name):
        parts = (arguments[name].unsqueeze(0) + temb.float()).chunk(6, dim=2)
        return [part.squeeze(2).double() for part in parts]

    r = x
    if arguments.get("residual") is not None:
        gate = block("gate_table")[5 if op == BOTH else 2] if arguments.get("gate_table") is not None else 1.0
        r = arguments["residual"].double() + gate * x
    outputs = [r]
    if op != "temb_residual":
        parameters = [arguments.get(name) for name in ("weight", "bias")]
        wide = [None if value is None else value.double() for value in parameters]
        y = torch.nn.functional.layer_norm(r.float().double() if op == BOTH else r, (256,), *wide, 1e-6)
        if arguments.get("table") is not None:
            shift, scale, *_ = block("table")
            y = y * (1 + scale) + shift
        outputs = [y, r] if op == BOTH else [y]
    for got, want in zip(getattr(reference, op)(**arguments), outputs, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_only_the_slices_that_are_read_count_as_moved():
    tokens, columns = 18144, 3072
    row = 2 * tokens * columns
    line = 2 * columns
    moved = {id: reference.bytes_moved(ROWS[f"wan-ti2v-{id}-18144x3072"]) for id in ("first-norm", "last-gate")}
    assert moved == {"first-norm": 4 * row + 2 * line, "last-gate": 4 * row + line}
    assert reference.bytes_moved(ROWS["wan-ti2v-feed-forward-norm-18144x3072"]) == 7 * row + 3 * line


# --- what the kernel does not cover


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": normal(4, 6, 256)[::2]}, "x has shape .* steps evenly"),
        ({"residual": normal(4, 6, 256)[::2]}, "residual has shape .* steps evenly"),
        ({"temb": torch.nn.Parameter(normal(2, 6, 6, 256))}, "temb requires gradients"),
        ({"temb": normal(4, 6, 6, 256)[::2]}, "temb has shape .* no form"),
        ({"table": torch._neg_view(normal(1, 6, 256))}, "table is a negated"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    op, arguments = make("whole")
    arguments |= change
    call = getattr(solution, op).kda_call(**arguments)
    assert re.search(reason, module._uncovered(call))
    assert launches(op, {k: v for k, v in arguments.items() if v is not None}, {}) == []
    with torch.no_grad():
        assert_right(getattr(solution, op), op, arguments)


# --- what has no meaning


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", normal(6, 256), r"x: expected three dimensions \[B, S, D\], got \[6, 256\]"),
        ("x", normal(2, 6, 256).double(), "x: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ("residual", normal(2, 5, 256), r"residual: expected shape \[2, 6, 256\], got \[2, 5, 256\]"),
        ("residual", None, "residual: expected a tensor, got None"),
        ("temb", None, "temb: expected a tensor, got None"),
        ("temb", normal(6, 256), r"temb: expected four dimensions \[B, S, K, D\] or three \[B, K, D\], got \[6, 256\]"),
        ("temb", normal(2, 5, 6, 256), r"temb: expected a shape that broadcasts to \[2, 6, K, 256\], got \[2, 5, 6, "),
        ("temb", normal(3, 6, 256), r"temb: expected a shape that broadcasts to \[2, K, 256\], got \[3, 6, 256\]"),
        ("temb", normal(2, 6, 6, 128), r"temb: expected a shape that broadcasts to \[2, 6, K, 256\], got "),
        ("temb", normal(2, 6, 6, 512)[..., ::2], "temb: expected stride 1 in its last dimension, got 2"),
        ("temb", normal(2, 6, 6, 256).double(), "temb: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ("table", normal(6, 256), r"table: expected shape \[1, 6, 256\], got \[6, 256\]"),
        ("table", normal(1, 6, 512)[..., ::2], "table: expected stride 1 in its last dimension, got 2"),
        ("gate_table", normal(1, 5, 256), r"gate_table: expected shape \[1, 6, 256\], got \[1, 5, 256\]"),
        ("weight", normal(512), r"weight: expected shape \[256\], got \[512\]"),
        ("gate", 6, "gate: expected the number of a slice, 0 to 5, got 6"),
        ("shift", -1, "shift: expected the number of a slice, 0 to 5, got -1"),
        ("scale", 0.5, "scale: expected the number of a slice, 0 to 5, got 0.5"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    op, arguments = make("whole")
    arguments |= {argument: value}
    with pytest.raises(ValueError, match=f"{BOTH}: {message}"):
        getattr(solution, op)(**arguments)
    with pytest.raises(ValueError, match=f"{BOTH}: {message}"):
        why_not(op, **arguments)


@pytest.mark.parametrize("columns", [0, 128, 8448])
def test_columns_outside_of_the_envelope(columns):
    op, arguments = make("first", columns=columns)
    with pytest.raises(ValueError, match=f"{NORM}: x: expected D a multiple of 256 up to 8192, got {columns}"):
        getattr(solution, op)(**arguments)


def test_a_table_is_asked_for_where_there_is_no_op_without_it():
    op, arguments = make("first")
    with pytest.raises(ValueError, match=f"{NORM}: table: expected a tensor, got None"):
        getattr(solution, op)(**arguments | {"table": None})
    op, arguments = make("last")
    with pytest.raises(ValueError, match="temb_residual: gate_table: expected a tensor, got None"):
        getattr(solution, op)(**arguments | {"gate_table": None})


# --- how calls become launches


@pytest.mark.parametrize(
    ("config", "columns", "item", "cut"),
    [
        (module.Config(4), 3072, 2, (4, 1, 1024)),
        (module.Config(8), 3072, 2, (4, 1, 1024)),
        (module.Config(2), 3072, 2, (4, 1, 1024)),
        (module.Config(4), 5120, 2, (4, 1, 1024)),
        (module.Config(4), 5120, 4, (4, 1, 512)),
        (module.Config(4), 8192, 2, (8, 1, 2048)),
        (module.Config(4, rows=4), 3072, 2, (4, 2, 1024)),
        (module.Config(4, rows=2), 8192, 2, (8, 2, 2048)),
        (module.Config(4), 256, 2, (1, 1, 256)),
        (module.Config(4), 256, 4, (2, 1, 256)),
    ],
)
def test_cuts_are_whole_and_fit_the_registers(config, columns, item, cut):
    assert module.cut(config, columns, item) == cut


def launched(id, config):
    """The launch of a frozen row."""
    row = ROWS[id]
    with module.TUNED.forced(config):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
    return launch


@pytest.mark.parametrize(
    ("id", "config", "ahead", "early"),
    [
        # 144 bytes of rows and 96 of shift and scale; 144 of lines.
        ("wan-ti2v-feed-forward-norm-18144x3072", module.Config(4), 3, False),
        ("wan-ti2v-feed-forward-norm-18144x3072", module.Config(4, early=True), 3, True),
        ("wan-ti2v-feed-forward-norm-18144x3072", module.Config(4, ahead=1), 1, False),
        # Two rows: 288 bytes, and 64 for each chunk.
        ("wan-ti2v-feed-forward-norm-18144x3072", module.Config(4, rows=2, early=True), 1, False),
        # 144 bytes; 48 of the gate's line, 192 of weight and bias.
        ("wan-ti2v-attention-norm-18144x3072", module.Config(4, early=True), 3, True),
        # 160 bytes, and 64 for each of 5 chunks.
        ("wan-t2v-cross-attention-norm-37800x5120", module.Config(4), 2, False),
    ],
)
def test_as_many_chunks_are_loaded_ahead_as_the_registers_hold(id, config, ahead, early):
    constants = launched(id, config).constexprs
    assert (constants["AHEAD"], constants["EARLY"]) == (ahead, early)


def test_registers_are_limited_to_what_holds_the_loads():
    id = "wan-ti2v-feed-forward-norm-18144x3072"
    assert launched(id, module.Config(4, maxnreg=96)).options["maxnreg"] == 96  # 240 bytes, and 128
    assert "maxnreg" not in launched(id, module.Config(4, maxnreg=80)).options
    assert launched(id, module.Config(4, maxnreg=80, ahead=1)).options["maxnreg"] == 80


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
    ("id", "slices", "streamed"),
    [
        ("wan-ti2v-first-norm-18144x3072", 2, 4),
        ("wan-ti2v-feed-forward-norm-18144x3072", 3, 6),
        ("wan-ti2v-last-gate-18144x3072", 1, 2),
        ("wan-t2v-feed-forward-norm-37800x5120", 3, 0),
    ],
)
def test_features_of_the_table(id, slices, streamed):
    row = ROWS[id]
    _, tokens, columns = row.inputs["x"].shape
    with module.TUNED.forced(module.Config(4)) as asked:
        launches(row.op, meta_tensors(row), row.scalars)
    assert asked == [{"bytes": 2 * tokens * columns, "width": columns, "slices": slices, "streamed": streamed}]


def test_numbers_that_are_not_read_make_no_variants():
    op, arguments = make("cross", device="meta")
    given = {name: value for name, value in arguments.items() if value is not None}
    kernels = {launches(op, given, {"gate": gate})[0].variant for gate in range(6)}
    assert len(kernels) == 1


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_numbers_and_eps_are_part_of_the_signature(self):
        for numbers in ({"shift": 0}, {"shift": 3}, {"scale": 4}, {"eps": 0.5}, {"shift": 0}):
            op, arguments = make("first", device="cuda", **numbers)
            assert_right(getattr(solution, op), op, arguments)

    def test_offsets_beyond_32_bits(self):
        tokens = 2**31 // (6 * 8192) + 9
        temb = torch.zeros(1, tokens, 6, 8192, dtype=torch.bfloat16, device="cuda")
        temb[:, -3:] = normal(1, 3, 6, 8192)
        x = normal(1, tokens, 8192).cuda()
        table = normal(1, 6, 8192, seed=1).cuda()
        y = solution.temb_norm_scale_shift(x, temb, table, 4, 5)
        last = solution.temb_norm_scale_shift(x[:, -3:].contiguous(), temb[:, -3:].contiguous(), table, 4, 5)
        assert torch.equal(y[:, -3:], last)
