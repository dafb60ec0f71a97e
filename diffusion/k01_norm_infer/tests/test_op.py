"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_runtime.checks import given

from ..baseline import eager
from ..solution import launches, norm, norm_infer, triton_one_pass_rms_norm, why_not
from .cases import assert_norm, assert_one_pass, make, normal

NORM, ONE_PASS = "norm_infer", "triton_one_pass_rms_norm"


# --- the plain path and the eager arm


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("affine", [("weight", "bias"), ("weight",), ("bias",), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_plain_path(dtype, affine, rms):
    assert_norm(*make(dtype=dtype, affine=affine), is_rms_norm=rms)
    assert_norm(*make(dtype=dtype, affine=affine, gap=3), is_rms_norm=rms)
    assert_one_pass(*make(dtype=dtype)[:2])


@pytest.mark.parametrize("rows", [0, 1])
def test_plain_path_with_out(rows):
    tensors = make(rows)
    assert_norm(*tensors, out=torch.empty(rows, 128))
    assert_norm(*tensors, out=torch.empty(128, rows, dtype=torch.bfloat16).T)
    assert_norm(*tensors, out=tensors[0])


@pytest.mark.parametrize("rms", [False, True])
def test_eager_arm(rms):
    assert_norm(*make(gap=3), is_rms_norm=rms, op=eager.norm_infer)
    assert_norm(*make(), is_rms_norm=rms, out=torch.empty(5, 128), op=eager.norm_infer)
    assert_one_pass(*make()[:2], op=eager.triton_one_pass_rms_norm)


# --- what the kernels do not cover


def call(x=None, weight=None, bias=None, out=None):
    given = make()
    return norm.Call(out, given[0] if x is None else x, weight, bias, 1e-6, False)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": normal(2, 8, dtype=torch.float64)}, "x has dtype torch.float64"),
        ({"x": normal(1, 16385, dtype=torch.float32)}, "a row has 65540 bytes"),
        ({"weight": normal(128, 2)[:, 0]}, "weight has gaps"),
        ({"bias": torch.nn.Parameter(normal(128))}, "bias requires gradients"),
        ({"out": normal(128, 5).T}, "out has stride 5 in its last dimension"),
        ({"out": normal(1, 128).expand(5, 128)}, "out has stride 0 between rows of 128"),
    ],
)
def test_what_the_kernel_does_not_cover(tensors, reason):
    made = call(**tensors)
    assert reason in norm._uncovered(made)
    inputs = {name: tensor for name, tensor in given(made).items() if name != "out"}
    assert launches(NORM, inputs, {"eps": 1e-6, "out": made.out}) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", normal(2, 3, 128), r"x: expected two dimensions .*, got \[2, 3, 128\]"),
        ("weight", normal(64), r"weight: expected shape \[128\], got \[64\]"),
        ("weight", normal(1, 128), r"weight: expected shape \[128\], got \[1, 128\]"),
        ("out", torch.zeros(5, 128, dtype=torch.int32), r"out: expected a floating-point dtype, got torch.int32"),
        ("out", torch.zeros(5, 128, device="meta"), r"out: expected device cpu, as x, got meta"),
        ("out", normal(6, 128), r"out: expected shape \[5, 128\], as x, got \[6, 128\]"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    arguments = dict(zip(("x", "weight", "bias"), make(), strict=True), eps=1e-6) | {argument: value}
    with pytest.raises(ValueError, match=f"norm_infer: {message}"):
        norm_infer(**arguments)
    with pytest.raises(ValueError, match=f"norm_infer: {message}"):
        why_not(NORM, **arguments)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.tensor(1.0), normal(1), r"x: expected one dimension or more .*, got \[\]"),
        (normal(5, 128), normal(64), r"w: expected 128 elements, got \[64\]"),
        (normal(5, 128), None, "w: expected a tensor, got None"),
    ],
)
def test_meaningless_arguments_of_the_one_pass_op_are_named(x, w, message):
    with pytest.raises(ValueError, match=f"triton_one_pass_rms_norm: {message}"):
        triton_one_pass_rms_norm(x, w)


# --- tracing


def test_the_op_for_out_is_registered_truthfully():
    torch.library.opcheck(norm.NORM_INFER.registered_into.default, (torch.empty(5, 128), *make(), 1e-5, False))


def test_full_graph_compilation_with_out():
    compiled = torch.compile(norm_infer, fullgraph=True, backend="aot_eager")
    tensors = make(gap=3)
    assert_norm(*tensors, out=torch.empty(5, 128), op=compiled)
    assert_norm(*tensors, out=tensors[0], op=compiled)


# --- how calls become launches


@pytest.mark.parametrize("op", [NORM, ONE_PASS])
@pytest.mark.parametrize(("rows", "width"), [(4096, 128), (1_000_003, 128), (3, 512), (9001, 5120), (7, 8192), (5, 96)])
def test_every_row_has_a_program(op, rows, width):
    x, weight = torch.empty(rows, width, device="meta"), torch.empty(width, device="meta")
    inputs = {"x": x, "weight" if op == NORM else "w": weight}
    (launch,) = launches(op, inputs, {"eps": 1e-6})
    per_program = launch.constexprs["ROWS"] * launch.constexprs["TILES"]
    assert launch.grid == (-(-rows // per_program), 1, 1)
    # Rows are masked exactly where the last program is not full.
    assert launch.args[4] == (rows if rows % per_program else None)


@pytest.mark.parametrize("layout", [((5, 128), (160, 1)), ((1, 128), (999, 1)), ((2, 1, 128), (160, 999, 1))])
def test_outputs_are_laid_out_as_upstream_does(layout):
    x = torch.empty_strided(*layout, device="meta")
    ready = norm._ready(norm.Call(None, x, None, None, 1e-6, True))
    assert torch.empty_like(ready.x).stride() == torch.empty_like(x.contiguous()).stride()


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_second_call_with_out_runs_the_plan_of_the_first(self, monkeypatch):
        tensors, out = make(device="cuda"), torch.empty(5, 128, device="cuda")
        assert_norm(*tensors, out=out)
        monkeypatch.setitem(vars(norm.NORM_INFER), "run", None)
        assert_norm(*tensors, out=out)

    def test_misaligned_out(self):
        tensors, out = make(device="cuda"), torch.empty(5 * 128 + 1, dtype=torch.bfloat16, device="cuda")
        assert_norm(*tensors, out=out[:-1].view(5, 128))
        assert_norm(*tensors, out=out[1:].view(5, 128))

    @pytest.mark.parametrize(("rows", "stride"), [(17_000_000, 128), (9, 2**28)])
    def test_offsets_beyond_32_bits(self, rows, stride):
        x = torch.empty((rows - 1) * stride + 128, dtype=torch.bfloat16, device="cuda").as_strided(
            (rows, 128), (stride, 1)
        )
        x[-3:] = normal(3, 128)
        w = normal(128, device="cuda")
        y = triton_one_pass_rms_norm(x, w)
        assert torch.equal(y[-3:], triton_one_pass_rms_norm(x[-3:].contiguous(), w))

    def test_full_graph_compilation_with_out_and_inductor(self):
        tensors = make(device="cuda")
        assert_norm(*tensors, out=tensors[0], op=torch.compile(norm_infer, fullgraph=True))
