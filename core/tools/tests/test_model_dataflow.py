"""What a step has to move where it is fused as far as its dataflow allows: sums by hand."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from kda_tools.models.dataflow import Dataflow, fused_bytes

TOKENS, WIDTH = 128, 64
UNIT = TOKENS * WIDTH * 4
"""Bytes of one float32 tensor."""


def kernels(step: Callable[..., torch.Tensor], count: int) -> list[float]:
    """What is left of a step with so many square weights and an input, in tensors of its size."""
    with FakeTensorMode():
        x = torch.empty(TOKENS, WIDTH)
        weights = [torch.empty(WIDTH, WIDTH) for _ in range(count)]
        with Dataflow() as flow:
            result = step(x, *weights)
        flow.hand_out(result)
    return [size / UNIT for size in fused_bytes(flow.operations)]


def test_operations_between_two_products_are_one_kernel() -> None:
    def step(x, w1, w2):
        y = x @ w1
        return (functional.silu(y) * y + 1) @ w2

    assert kernels(step, 2) == [2]  # y is read, the sum is written


def test_what_is_read_behind_the_next_product_is_written_and_read_once_more() -> None:
    def step(x, w1, w2):
        y = functional.silu(x @ w1)
        return functional.silu(y @ w2) + y

    assert kernels(step, 2) == [2, 3]


def test_a_product_does_a_function_of_its_whole_result() -> None:
    def whole(x, w1, w2):
        return functional.gelu(x @ w1) @ w2

    def part(x, w1, w2):
        return functional.gelu((x @ w1)[:, : WIDTH // 2]) @ w2[: WIDTH // 2]

    def read_elsewhere(x, w1, w2):
        y = x @ w1
        return functional.gelu(y) @ w2 + y

    assert kernels(whole, 2) == []
    assert kernels(part, 2) == [1]
    assert kernels(read_elsewhere, 2) == [2, 3]


def test_what_is_only_needed_later_waits() -> None:
    def step(x, w1, w2, w3):
        late = functional.gelu(x @ w1)
        attended = functional.scaled_dot_product_attention((x @ w2)[None, None], x[None, None], x[None, None])[0, 0]
        return torch.cat([attended, late]) @ w3

    assert kernels(step, 3) == [4]  # both parts are read, and their concatenation is written


def test_parts_of_a_tensor_count_as_much_as_they_hold_and_views_as_nothing() -> None:
    def step(x, w1, w2):
        a, b = (x @ w1).chunk(2, dim=1)
        return torch.cat([a * b, b.reshape(TOKENS, -1)], dim=1) @ w2

    assert kernels(step, 2) == [2]

    def half(x, w1, w2):
        a, _ = (x @ w1).chunk(2, dim=1)
        return a.exp() @ w2[: WIDTH // 2]

    assert kernels(half, 2) == [1]


def test_a_sum_of_which_each_kernel_reads_another_slice_is_not_written() -> None:
    half = WIDTH // 2

    def step(x, w1, w2):
        first, second = (x + w1[:1]).chunk(2, dim=1)
        y = (x @ w1)[:, :half] * first
        return (y @ w2[:half])[:, :half] * second

    # Each kernel reads half of a product and of x, and writes half; and it reads half of a row.
    assert kernels(step, 2) == [pytest.approx(1.5 + 0.5 / TOKENS, abs=0.6 / TOKENS)] * 2

    def reduced(x, w1, w2):
        first, second = x.softmax(dim=1).chunk(2, dim=1)
        y = (x @ w1)[:, :half] * first
        return (y @ w2[:half])[:, :half] * second

    # A reduction is not repeated: the first kernel reads x, and writes the second slice.
    assert sum(kernels(reduced, 2)) == pytest.approx(4.0)


def test_what_a_product_reads_is_written_even_if_it_could_be_repeated() -> None:
    def step(x, w1, w2):
        y = x + 1
        return (y @ w1) * y

    assert kernels(step, 2) == [2, 3]


def test_what_is_written_in_place_is_another_value() -> None:
    def step(x, w1, w2):
        y = x @ w1
        z = y @ w2
        y.add_(1)
        return y @ w2 + z

    # y is read and written in the first kernel; the products are read in the last one, which is handed out
    assert kernels(step, 2) == [2, 3]


@pytest.mark.parametrize("expanded", [True, False])
def test_an_expanded_dimension_counts_once(expanded: bool) -> None:
    def step(x, w1, w2):
        row = (x @ w1)[:1]
        return (row.expand(TOKENS, WIDTH) if expanded else (x @ w1)).exp() @ w2

    assert kernels(step, 2) == [pytest.approx(1 + (1 / TOKENS if expanded else 1))]
