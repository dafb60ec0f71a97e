"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from ..baseline import eager
from ..solution import launches, silu_and_mul, why_not
from ..solution.silu_and_mul import OP, TUNED, Call, Config, plan
from .cases import assert_filtered, assert_right, normal

SORTED = {"num_tokens_post_padded": torch.tensor([4]), "num_valid_tokens": 3}


# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_plain_path(dtype):
    assert_right(normal(3, 4, 10, dtype=dtype))
    assert_right(normal(0, 10, dtype=dtype))
    assert_right(normal(3, 10, dtype=dtype), torch.empty(5, 3, dtype=dtype).T)


def test_eager_arm():
    assert_right(normal(3, 10, dtype=torch.float32), op=eager.silu_and_mul)
    assert_right(normal(3, 10), torch.empty(3, 5, dtype=torch.bfloat16), op=eager.silu_and_mul)


def test_plain_path_leaves_rows_out():
    x, idle = normal(4, 10), torch.tensor([False, True, True, False])
    assert_filtered(x, idle, torch.tensor([3, -1, -1, 0]))
    assert_filtered(x, idle, torch.tensor([3, 0]), 2, sorted_token_ids=torch.tensor([0, 3, 5, 2]), **SORTED)
    assert_filtered(x, torch.tensor([False] * 2 + [True] * 2), torch.tensor([3, -1]), 2)


# --- what the kernel does not cover, and what has no meaning


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((normal(3, 10, dtype=torch.float64),), "input has dtype torch.float64"),
        ((normal(3, 10), normal(5, 3).T), "out has gaps"),
        ((torch.nn.Parameter(normal(3, 10)),), "input requires gradients"),
    ],
)
def test_what_the_kernel_does_not_cover(arguments, reason):
    inputs = dict(zip(("input", "out"), arguments, strict=False))
    assert launches("silu_and_mul", inputs, {}) == []
    assert reason in OP.uncovered(Call(*(inputs.get(name) for name in ("out", "input")), None, None, None, 1, 0))


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((normal(3, 9),), {}, r"input: expected an even number of columns, got \[3, 9\]"),
        ((normal(3, 0),), {}, r"input: expected an even number of columns, got \[3, 0\]"),
        ((normal(3, 10), normal(3, 10)), {}, r"out: expected shape \[3, 5\] and dtype torch.bfloat16, got "),
        ((normal(3, 10), None, torch.tensor([1])), {}, "expert_ids: expected one for every 1 of 3 rows, got 1"),
        ((normal(3, 10), None, torch.tensor([1]), 0), {}, "expert_step: expected a positive number, got 0"),
        ((normal(3, 10), None, torch.tensor([1.0]), 3), {}, "expert_ids: expected an integer dtype or bool, got "),
        (
            (normal(3, 10), None, torch.tensor([1]), 3),
            {"sorted_token_ids": torch.tensor([1]), **SORTED},
            "sorted_token_ids: expected one for each of 3 rows, got 1",
        ),
        (
            (normal(3, 10), None, torch.tensor([1]), 3),
            {"sorted_token_ids": torch.tensor([1, 2, 3])},
            "num_tokens_post_padded: expected one number, got None",
        ),
    ],
)
def test_meaningless_arguments_are_named(arguments, more, message):
    for function in (silu_and_mul, lambda *given, **named: why_not("silu_and_mul", *given, **named)):
        with pytest.raises(ValueError, match=f"silu_and_mul: {message}"):
            function(*arguments, **more)


# --- tracing


def test_the_op_for_out_is_registered_truthfully():
    x, out = normal(3, 10), torch.empty(3, 5, dtype=torch.bfloat16)
    torch.library.opcheck(OP.registered_into.default, (out, x, None, None, None, 1, 0))


def test_full_graph_compilation_with_filters():
    compiled = torch.compile(silu_and_mul, fullgraph=True, backend="aot_eager")
    x, experts = normal(4, 10), torch.tensor([3, -1])
    assert torch.equal(compiled(x, None, experts, 2)[:2], silu_and_mul(x)[:2])


# --- how calls become launches


@pytest.mark.parametrize(
    ("config", "rows", "width", "block", "tile"),
    [
        (Config(4, 1), 4096, 12288, 1024, 1),
        (Config(4, 2), 4096, 12288, 2048, 1),
        (Config(16, 4), 4096, 12288, 4096, 4),
        (Config(4, 1), 4096, 768, 256, 4),
        (Config(1, 1), 4096, 192, 64, 4),
        (Config(4, 4), 8, 192, 64, 8),
        (Config(4, 1), 3, 100, 128, 4),
        (Config(1, 1), 3, 1368, 256, 1),
    ],
)
def test_a_program_takes_blocks_that_divide_rows(config, rows, width, block, tile):
    x = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device="meta")
    with TUNED.forced(config):
        launch = plan(Call(None, x, None, None, None, 1, 0))
    assert (launch.constexprs["BLOCK"], launch.constexprs["ROWS"]) == (block, tile)
    assert launch.grid == (-(-rows // tile) * -(-width // block), 1, 1)
    # Rows are masked exactly where the last program is not full.
    assert launch.args[5] == (rows if rows % tile else None)


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_misaligned(self):
        buffer = normal(5 * 128 + 1, device="cuda")
        assert_right(buffer[:-1].view(5, 128))
        assert_right(buffer[1:].view(5, 128))

    def test_offsets_beyond_32_bits(self):
        x = torch.empty(2**17, 2 * 12288, dtype=torch.bfloat16, device="cuda")
        x[-3:] = normal(3, 2 * 12288)
        assert torch.equal(silu_and_mul(x)[-3:], silu_and_mul(x[-3:].contiguous()))

    def test_second_call_with_filters_runs_the_plan_of_the_first(self, monkeypatch):
        x, experts = normal(4, 128, device="cuda"), torch.tensor([3, -1, 0, 1], dtype=torch.int32, device="cuda")
        assert_filtered(x, experts == -1, experts)
        monkeypatch.setitem(vars(OP), "run", None)
        assert_filtered(x, experts == -1, experts)
