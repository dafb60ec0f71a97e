"""The ops around their kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ..baseline import eager
from ..solution import launches, per_token_group_quant, silu_and_mul_quant, why_not
from ..solution.group_quant import FUSED, QUANT, TUNED, Call, Config, _uncovered, plan
from .cases import LAYOUTS, assert_right, codes, normal, outputs

# --- the plain path and the eager arm


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_path(dtype, layout, fused):
    for rows in (0, 5):
        x = normal(rows, 256 * (1 + fused), dtype=dtype)
        assert_right(x, *outputs(rows, 256, layout=layout), fused=fused)
    assert_right(normal(5, 6 * (1 + fused), dtype=dtype), *outputs(5, 6, 3), group=3, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_eager_arm(fused):
    op = eager.silu_and_mul_quant if fused else eager.per_token_group_quant
    assert_right(normal(5, 256 * (1 + fused)), *outputs(5, 256), fused=fused, op=op)


# --- upstream's signature


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_new_outputs_are_those_that_a_caller_would_bring(fused, column_major):
    x = normal(5, 512)
    mode = {"fuse_silu_and_mul": fused, "silu_and_mul_mode": "dense"}
    q, s = per_token_group_quant(x, column_major_scales=column_major, **mode)
    width = x.shape[1] // (1 + fused)
    want_q, want_s = outputs(5, width, layout="columns" if column_major else "rows")
    (silu_and_mul_quant if fused else per_token_group_quant)(x, want_q, want_s)
    assert torch.equal(codes(q), codes(want_q))
    assert torch.equal(s, want_s)
    assert (q.stride(), s.stride()) == (want_q.stride(), want_s.stride())


def test_the_fused_op_is_the_two_one_behind_the_other():
    x = normal(7, 1024)
    gate, up = x.float().chunk(2, dim=-1)
    q, s = per_token_group_quant((torch.nn.functional.silu(gate) * up).bfloat16())
    fused_q, fused_s = silu_and_mul_quant(x, *outputs(7, 512, layout="rows"))
    assert torch.equal(codes(q), codes(fused_q))
    assert torch.equal(s, fused_s)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scale_ue8m0": True}, "scale_ue8m0: expected False, for scales in float32, got True"),
        ({"masked_m": torch.tensor([1])}, "masked_m: expected None, rows of one batch, got tensor"),
        ({"sorted_token_ids": torch.tensor([1])}, "sorted_token_ids: expected None, rows without padding, got tensor"),
        ({"out_dtype": torch.int8}, "out_dtype: expected torch.float8_e4m3fn or None, got torch.int8"),
        ({"silu_and_mul_mode": "sparse"}, "silu_and_mul_mode: expected legacy or dense, got sparse"),
        ({"output_s": torch.zeros(5, 2)}, "output_s: expected as output_q: both or none, got tensor"),
    ],
)
def test_what_upstream_has_besides_is_named(more, message):
    for function in (per_token_group_quant, lambda *given, **named: why_not("per_token_group_quant", *given, **named)):
        with pytest.raises(ValueError, match=f"per_token_group_quant: {message}"):
            function(normal(5, 256), **more)


# --- what the kernel does not cover, and what has no meaning


@pytest.mark.parametrize(
    ("tensors", "group", "reason"),
    [
        ({"input": normal(5, 256, dtype=torch.float64)}, 128, "input has dtype torch.float64"),
        ({"input": normal(5, 256).to(torch.float8_e4m3fn)}, 128, "input has dtype torch.float8_e4m3fn"),
        ({"input": torch.nn.Parameter(normal(5, 256))}, 128, "input requires gradients"),
        ({"input": normal(256, 5).T}, 128, "input has stride 5 in its last dimension"),
        ({"output_s": torch.zeros(1, 2).expand(5, 2)}, 128, "output_s has strides"),
        ({}, 8, "group_size is 8; the kernel takes 16, 32, 64, 128, 256"),
    ],
)
def test_what_the_kernel_does_not_cover(tensors, group, reason):
    q, s = outputs(5, 256, group)
    inputs = {"input": normal(5, 256), "output_q": q, "output_s": s, **tensors}
    call = Call(inputs["output_q"], inputs["output_s"], inputs["input"], group, "")
    assert reason in str(_uncovered(call))
    assert launches("per_token_group_quant", inputs, {"group_size": group}) == []


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)])
def test_gpus_without_float8_take_the_plain_path(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with FakeTensorMode():  # tensors of a GPU, without one
        q, s, x = (
            torch.empty(5, width, dtype=dtype, device="cuda")
            for width, dtype in ((256, torch.float8_e4m3fn), (2, torch.float32), (256, torch.bfloat16))
        )
        reason = _uncovered(Call(q, s, x, 128, ""))
    if capability < (8, 9):
        said = f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernel takes 8.9 and up"
        assert str(reason).startswith(said)
    else:
        assert reason is None


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("input", normal(2, 5, 128), r"input: expected 2 dimensions \[rows, columns\], got \[2, 5, 128\]"),
        ("input", normal(5, 0), r"input: expected a multiple of 1 columns, got \[5, 0\]"),
        ("group_size", 0, "group_size: expected a divisor of the 256 columns to quantise, got 0"),
        ("group_size", 96, "group_size: expected a divisor of the 256 columns to quantise, got 96"),
        ("output_q", normal(5, 256), "output_q: expected dtype torch.float8_e4m3fn, got torch.bfloat16"),
        ("output_q", outputs(4, 256)[0], r"output_q: expected shape \[5, 256\], got \[4, 256\]"),
        ("output_s", torch.zeros(5, 4), r"output_s: expected shape \[5, 2\], got \[5, 4\]"),
        (
            "output_s",
            torch.zeros(5, 2, dtype=torch.float64),
            "output_s: expected dtype torch.float32, got torch.float64",
        ),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    q, s = outputs(5, 256)
    arguments = {"input": normal(5, 256), "output_q": q, "output_s": s, "group_size": 128, argument: value}
    for function in (per_token_group_quant, lambda **given: why_not("per_token_group_quant", **given)):
        with pytest.raises(ValueError, match=f"per_token_group_quant: {message}"):
            function(**arguments)


def test_halves_are_counted():
    with pytest.raises(
        ValueError, match=r"silu_and_mul_quant: input: expected a multiple of 2 columns, got \[5, 257\]"
    ):
        silu_and_mul_quant(normal(5, 257), *outputs(5, 128))


# --- tracing


def test_full_graph_compilation_with_new_outputs():
    compiled = torch.compile(per_token_group_quant, fullgraph=True, backend="aot_eager")
    x = normal(5, 256)
    for got, want in zip(compiled(x), per_token_group_quant(x), strict=True):
        assert torch.equal(got.float(), want.float())


# --- how calls become launches


@pytest.mark.parametrize(
    ("config", "rows", "width", "group", "beside", "tile", "warps"),
    [
        (Config(4), 4096, 7168, 128, 4, 4, 4),
        (Config(4, 2), 4096, 7168, 128, 4, 8, 4),
        (Config(4, beside=1), 4096, 7168, 128, 1, 16, 4),
        (Config(1, beside=64), 1, 7168, 128, 4, 1, 1),
        (Config(1), 4096, 384, 128, 1, 4, 1),
        (Config(4), 3, 2048, 256, 4, 2, 4),
        (Config(4), 1, 7168, 128, 4, 1, 1),
        (Config(8, beside=8), 1, 7168, 128, 8, 1, 2),
        (Config(4), 1, 2048, 16, 4, 1, 1),
    ],
)
def test_a_program_takes_whole_groups_and_no_more_warps_than_they_fill(config, rows, width, group, beside, tile, warps):
    q, s = outputs(rows, width, group, device="meta")
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    with TUNED.forced(config):
        launch = plan(Call(q, s, x, group, ""))
    assert (launch.constexprs["BESIDE"], launch.constexprs["ROWS"]) == (beside, tile)
    assert launch.options["num_warps"] == warps
    assert launch.grid == (-(-rows // tile) * (width // group // beside), 1, 1)
    # Rows are masked exactly where the last program is not full.
    assert launch.args[3] == (rows if rows % tile else None)


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("fused", [False, True])
    def test_second_call_runs_the_plan_of_the_first(self, monkeypatch, fused):
        made = lambda: (normal(5, 256 * (1 + fused), device="cuda"), *outputs(5, 256, device="cuda"))  # noqa: E731
        assert_right(*made(), fused=fused)
        monkeypatch.setitem(vars(FUSED if fused else QUANT), "run", None)
        assert_right(*made(), fused=fused)

    def test_misaligned(self):
        buffer = normal(5 * 256 + 1, device="cuda")
        for x in (buffer[:-1], buffer[1:]):
            assert_right(x.view(5, 256), *outputs(5, 256, device="cuda"))
        q = torch.empty(5 * 256 + 1, dtype=torch.float8_e4m3fn, device="cuda")[1:].view(5, 256)
        assert_right(normal(5, 256, device="cuda"), q, outputs(5, 256, device="cuda")[1])

    def test_offsets_beyond_32_bits(self):
        rows, stride = 9, 2**28
        x = torch.empty((rows - 1) * stride + 256, dtype=torch.bfloat16, device="cuda").as_strided(
            (rows, 256), (stride, 1)
        )
        x.copy_(normal(rows, 256))
        assert_right(x, *outputs(rows, 256, device="cuda"))

    def test_full_graph_compilation_with_inductor(self):
        x = normal(5, 256, device="cuda")
        got = torch.compile(per_token_group_quant, fullgraph=True)(x)
        assert all(
            torch.equal(*map(torch.Tensor.float, pair)) for pair in zip(got, per_token_group_quant(x), strict=True)
        )
