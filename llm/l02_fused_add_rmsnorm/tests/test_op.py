"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_runtime.checks import given

from ..baseline import eager
from ..solution import fused_add_rmsnorm, launches, rmsnorm, why_not
from ..solution.rmsnorm import FUSED, INPLACE, INTO, TUNED, Call, Config, _uncovered, plan
from .cases import assert_fused, assert_norm, make, normal

# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 5])
def test_plain_path(dtype, rows):
    x, residual, weight = make(rows, dtype=dtype, gap=3)
    assert_fused(x, residual, weight)
    assert_norm(x, weight, residual)
    assert_norm(x, weight, torch.empty(128, rows, dtype=dtype).T)
    assert_norm(x, weight)


def test_eager_arm():
    assert_fused(*make(gap=3), op=eager.fused_add_rmsnorm)
    x, residual, weight = make(gap=3)
    assert_norm(x, weight, residual, op=eager.rmsnorm)
    assert_norm(x, weight, op=eager.rmsnorm)


# --- what the kernels do not cover


def call(input=None, residual=None, weight=None, out=None):
    x, other, vector = make()
    return Call(
        out,
        other if residual is None else residual,
        x if input is None else input,
        vector if weight is None else weight,
        1e-6,
    )


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"input": normal(5, 128, dtype=torch.float64)}, "input has dtype torch.float64"),
        ({"input": normal(1, 16385)}, "a row has 16385 columns"),
        ({"weight": normal(128, 2)[:, 0]}, "weight has stride 2"),
        ({"weight": torch.nn.Parameter(normal(128))}, "weight requires gradients"),
        ({"input": normal(128, 5).T}, "input has shape [5, 128] and strides (1, 5)"),
        ({"residual": normal(1, 128).expand(5, 128)}, "residual has shape [5, 128] and strides (0, 1)"),
        ({"input": normal(5, 256)[:, ::2]}, "input has stride 2 in its last dimension"),
    ],
)
def test_what_the_kernel_does_not_cover(tensors, reason):
    made = call(**tensors)
    assert reason in str(_uncovered(made))
    if made.input.shape == made.residual.shape and made.input.dtype == made.residual.dtype:
        assert (
            launches("fused_add_rmsnorm", {name: getattr(made, name) for name in ("input", "residual", "weight")}, {})
            == []
        )


# --- what has no meaning


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("input", torch.tensor(1.0), r"input: expected one dimension or more .*, got \[\]"),
        ("input", normal(5, 0), r"input: expected one dimension or more \[..., columns\], with columns, got \[5, 0\]"),
        ("residual", normal(4, 128), r"residual: expected shape \[5, 128\], as input, got \[4, 128\]"),
        ("residual", normal(5, 128).half(), "residual: expected dtype torch.bfloat16, got torch.float16"),
        ("residual", None, "residual: expected a tensor, got None"),
        ("weight", normal(64), r"weight: expected shape \[128\], got \[64\]"),
        ("weight", torch.zeros(128, device="meta"), "weight: expected device cpu, as input, got meta"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    arguments = dict(zip(("input", "residual", "weight"), make(), strict=True)) | {argument: value}
    for function in (fused_add_rmsnorm, lambda **given: why_not("fused_add_rmsnorm", **given)):
        with pytest.raises(ValueError, match=f"fused_add_rmsnorm: {message}"):
            function(**arguments)


def test_an_out_that_does_not_fit_is_named():
    x, _, weight = make()
    with pytest.raises(ValueError, match=r"rmsnorm: out: expected shape \[5, 128\], as input, got \[6, 128\]"):
        rmsnorm(x, weight, normal(6, 128))
    with pytest.raises(ValueError, match=r"rmsnorm: out: expected dtype torch.bfloat16, got torch.float32"):
        rmsnorm(x, weight, torch.empty(5, 128))
    with pytest.raises(ValueError, match=r"rmsnorm_inplace: weight: expected shape \[128\]"):
        rmsnorm(x, normal(5))


# --- tracing


def test_the_ops_are_registered_truthfully():
    x, residual, weight = make()
    eps = 1e-5
    torch.library.opcheck(FUSED.registered.default, (None, residual, x, weight, eps))
    torch.library.opcheck(INTO.registered.default, (residual, None, x, weight, eps))
    torch.library.opcheck(INPLACE.registered.default, (None, None, x, weight, eps))


def test_full_graph_compilation():
    x, residual, weight = make(gap=3)
    compiled = torch.compile(rmsnorm, fullgraph=True, backend="aot_eager")
    assert_norm(x, weight, residual, op=compiled)
    assert_norm(x, weight, op=compiled)
    assert_norm(residual, weight, residual, op=compiled)


# --- how calls become launches


@pytest.mark.parametrize(
    ("config", "width", "warps", "block", "tile"),
    [
        (Config(1), 4096, 16, 4096, 1),
        (Config(2), 4096, 8, 2048, 1),
        (Config(2, rows=2), 4096, 8, 2048, 2),
        (Config(2, beside=2), 4096, 16, 2048, 2),
        (Config(4, beside=4), 7168, 32, 2048, 4),
        (Config(1), 7168, 32, 8192, 1),
        (Config(1), 16384, 32, 8192, 1),
        (Config(3), 2880, 4, 1024, 1),
        (Config(8), 100, 1, 128, 2),
        (Config(8, beside=4), 100, 4, 128, 8),
    ],
)
def test_a_row_is_spread_over_warps(config, width, warps, block, tile):
    x, residual, weight = (tensor.to("meta") for tensor in make(3, width))
    with TUNED.forced(config):
        launch = plan(Call(None, residual, x, weight, 1e-6))
    assert launch.options["num_warps"] == warps
    assert (launch.constexprs["BLOCK"], launch.constexprs["ROWS"]) == (block, tile)
    assert launch.grid == (-(-3 // tile), 1, 1)
    # Rows are masked exactly where the last program is not full.
    assert launch.args[4] == (3 if 3 % tile else None)


@pytest.mark.parametrize("rows", [1, 64, 4097])
@pytest.mark.parametrize("width", [1, 512, 2880, 8192])
def test_every_row_has_a_program(rows, width):
    x, weight = torch.empty(rows, width, device="meta"), torch.empty(width, device="meta")
    for op, more in (("fused_add_rmsnorm", {"residual": x}), ("rmsnorm", {"out": x})):
        (launch,) = launches(op, {"input": x, "weight": weight, **more}, {"eps": 1e-6})
        tile = launch.constexprs["ROWS"]
        assert launch.grid == (-(-rows // tile), 1, 1)


def test_rmsnorm_without_out_is_planned_as_with_its_input():
    x, _, weight = make()
    (one,) = launches("rmsnorm", {"input": x, "weight": weight}, {})
    (other,) = launches("rmsnorm", {"input": x, "weight": weight, "out": x}, {})
    assert one.grid == other.grid
    assert one.constexprs == other.constexprs
    assert list(given(Call(x, None, x, weight, 1e-6))) == ["out", "input", "weight"]


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_second_call_runs_the_plan_of_the_first(self, monkeypatch):
        x, residual, weight = make(device="cuda")
        assert_fused(x, residual, weight)
        assert_norm(x, weight)
        assert_norm(x, weight, residual)
        for op in (FUSED, INTO, INPLACE):
            monkeypatch.setitem(vars(op), "run", None)
        assert_fused(x, residual, weight)
        assert_norm(x, weight)
        assert_norm(x, weight, residual)

    def test_misaligned(self):
        buffer = normal(5 * 128 + 1, device="cuda")
        _, residual, weight = make(device="cuda")
        assert_fused(buffer[:-1].view(5, 128), residual, weight)
        assert_fused(buffer[1:].view(5, 128), residual, weight)

    def test_offsets_beyond_32_bits(self):
        rows, stride = 9, 2**28
        x = torch.empty((rows - 1) * stride + 128, dtype=torch.bfloat16, device="cuda")
        x = x.as_strided((rows, 128), (stride, 1))
        x.copy_(normal(rows, 128))
        assert_norm(x, normal(128, device="cuda"), torch.empty(rows, 128, dtype=x.dtype, device="cuda"))

    def test_full_graph_compilation_with_inductor(self):
        assert_fused(*make(device="cuda"), op=torch.compile(fused_add_rmsnorm, fullgraph=True))
        x, _, weight = make(device="cuda")
        assert_norm(x, weight, op=torch.compile(rmsnorm, fullgraph=True))
