"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import silu_and_mul, why_not
from ..solution.silu_and_mul import TUNED, Config
from .cases import assert_filtered, assert_right, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(x):
    assert why_not("silu_and_mul", x) is None
    assert_right(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 50, 65, 192, 256, 768, 1368, 12288])
def test_widths(width, dtype):
    check(normal(3, 2 * width, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("width", [192, 768])
def test_row_counts_that_fill_programs_and_that_do_not(rows, width):
    for config in (Config(4, 2), Config(1, 1)):
        with TUNED.forced(config):
            check(normal(rows, 2 * width, device=DEVICE))


@pytest.mark.parametrize(
    "view", [lambda x: x[::2], lambda x: x[..., :96], lambda x: x.transpose(0, 1), lambda x: x[0, 0], lambda x: x[None]]
)
def test_layouts(view):
    check(view(normal(4, 3, 128, device=DEVICE)))


def test_out():
    x, out = normal(5, 128, device=DEVICE), torch.empty(5, 64, dtype=torch.bfloat16, device=DEVICE)
    assert why_not("silu_and_mul", x, out) is None
    assert_right(x, out)


def test_large_values():
    """exp(-gate) overflows on one side and vanishes on the other."""
    x = torch.tensor([[-3e38, -1e4, -200.0, -100.0, 100.0, 1e4, 3e38, 0.0]], device=DEVICE)
    x = torch.cat((x, torch.ones_like(x)), dim=-1)
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0, 100.0, 1e4, 3e38, 0.0]], device=DEVICE)
    torch.testing.assert_close(silu_and_mul(x), want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "step"), [(9, 1), (9, 4), (33, 16)])
def test_rows_of_no_expert_are_left_alone(rows, step, dtype):
    x = normal(rows, 2 * 192, device=DEVICE)
    experts = torch.tensor([3, -1, 0, -1, 5, 7, -1, 2, 1], dtype=dtype, device=DEVICE)[: -(-rows // step)]
    idle = (experts == -1).repeat_interleave(step)[:rows]
    assert why_not("silu_and_mul", x, None, experts, step) is None
    assert_filtered(x, idle, experts, step)
    assert torch.equal(silu_and_mul(x, None, experts, step)[~idle], silu_and_mul(x)[~idle])


@pytest.mark.parametrize("width", [192, 768])
def test_padding_of_the_block_padded_layout_is_left_alone(width):
    x = normal(16, 2 * width, device=DEVICE)
    slots = torch.tensor([0, 5, 9, 9, 2, 9, 9, 9, 1, 3, 4, 7, 6, 8, -1, 0], dtype=torch.int32, device=DEVICE)
    experts = torch.tensor([0, -1, 2, 2], dtype=torch.int32, device=DEVICE)
    end = torch.tensor([14], dtype=torch.int32, device=DEVICE)
    row = torch.arange(16, device=DEVICE)
    idle = (slots == 9) | (slots == -1) | (row >= 14) | ((row >= 4) & (row < 8))
    sorted_ = {"sorted_token_ids": slots, "num_tokens_post_padded": end, "num_valid_tokens": 9}
    assert why_not("silu_and_mul", x, None, experts, 4, **sorted_) is None
    assert_filtered(x, idle, experts, 4, **sorted_)
    # Without experts upstream does not look at the rest.
    assert torch.equal(silu_and_mul(x, **sorted_), silu_and_mul(x))


@pytest.mark.parametrize("width", [65, 192, 768])
@pytest.mark.parametrize("config", TUNED.configs, ids=str)
def test_every_tuned_configuration(config, width):
    for rows in (4, 7):
        with TUNED.forced(config) as asked:
            check(normal(rows, 2 * width, device=DEVICE))
        assert len(asked) == 1
