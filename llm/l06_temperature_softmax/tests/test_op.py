"""The op around its kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import re

import pytest
import torch

from kda_runtime.checks import given
from kda_runtime.cubin import CubinLaunch
from kda_runtime.launch import Launch

from ..baseline import eager
from ..solution import launches, plans, softmax, why_not
from ..solution.softmax import Call, _uncovered
from .cases import assert_matches, make

# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_path(dtype):
    logits, temperatures = make(dtype=dtype)
    assert_matches(softmax(logits, temperatures), logits, temperatures)
    assert_matches(softmax(logits.float(), None), logits.float(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_arm(dtype):
    logits, temperatures = make(dtype=dtype)
    assert_matches(eager.softmax(logits, temperatures), logits, temperatures)


@pytest.mark.parametrize("shape", [(2, 3, 5), (5,), (0, 5), (3, 0), ()])
def test_shapes_that_only_pytorch_takes(shape):
    logits = torch.randn(shape)
    torch.testing.assert_close(softmax(logits), torch.softmax(logits, -1))
    torch.testing.assert_close(softmax(logits, torch.tensor([0.5])), torch.softmax(logits / torch.tensor([0.5]), -1))


def test_a_result_of_more_rows_than_logits():
    logits, temperatures = make()
    torch.testing.assert_close(softmax(logits[0], temperatures), torch.softmax(logits[0] / temperatures, -1))


# --- what the kernels do not cover


@pytest.mark.parametrize(
    ("logits", "temperatures", "reason"),
    [
        (torch.zeros(2, 3, 5), None, "logits has 3 dimensions"),
        (torch.zeros(2, 5, dtype=torch.bfloat16), None, "the probabilities have dtype torch.bfloat16"),
        (torch.zeros(2, 5), torch.ones(2, 1, dtype=torch.float64), "the probabilities have dtype torch.float64"),
        (torch.zeros(2, 5), torch.ones(2, 5), r"temperatures has shape \[2, 5\]"),
        (torch.zeros(2, 5), torch.ones(1, 1, 1), r"temperatures has shape \[1, 1, 1\]"),
        (torch.zeros(5, 2).T, torch.ones(2, 1), "logits has stride 2 in its last dimension"),
        (torch.zeros(2, 5), torch.nn.Parameter(torch.ones(2, 1)), "temperatures requires gradients"),
    ],
)
def test_what_the_kernels_do_not_cover(logits, temperatures, reason):
    call = Call(logits, temperatures)
    assert re.search(reason, _uncovered(call))
    assert launches("softmax", given(call), {}) == []


@pytest.mark.parametrize("ask", [softmax, lambda *args: why_not("softmax", *args)])
def test_meaningless_temperatures_are_named(ask):
    message = r"softmax: temperatures: expected a shape that broadcasts with \[3, 1000\], got \[4, 1\]"
    with pytest.raises(ValueError, match=message):
        ask(make()[0], torch.ones(4, 1))


# --- how calls become launches


def planned(rows, vocabulary, config, dtype=torch.float32):
    logits = torch.empty(rows, vocabulary, dtype=dtype, device="meta")
    with plans.TUNED.forced(config):
        return plans.plan(Call(logits, torch.empty(rows, 1, device="meta"))).launches


@pytest.mark.parametrize(("vocabulary", "parts", "block"), [(100, 1, 128), (8192, 1, 8192), (8193, 2, 8192)])
def test_rows_are_cut_into_parts(vocabulary, parts, block):
    first, second = planned(3, vocabulary, plans.Config("split", 8, elements=8192))
    assert isinstance(first, Launch)
    assert first.grid == second.grid == (3 * parts, 1, 1)
    assert (first.constexprs["PARTS"], first.constexprs["BLOCK"]) == (parts, block)


def test_rows_have_at_most_so_many_parts():
    first, _ = planned(1, 4097 * 1024, plans.Config("split", 8, elements=1024))
    assert (first.constexprs["PARTS"], first.constexprs["BLOCK"]) == (2049, 2048)


@pytest.mark.parametrize(
    ("vocabulary", "blocks", "tiles", "share"),
    [(151936, 16, 10, 2376), (128256, 16, 8, 2008), (1024 * 16, 16, 1, 256), (1024 * 16 // 2, 8, 1, 256), (4, 2, 1, 8)],
)
def test_every_block_of_a_cluster_has_a_share(vocabulary, blocks, tiles, share):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (launch,) = planned(5, vocabulary, plans.Config("cluster", 8, 16))
    assert (launch.config.blocks, launch.tiles, launch.numbers[1]) == (blocks, tiles, share)
    assert launch.with_code(b"").grid == (5 * blocks, 1, 1)
    assert share * blocks * 4 >= vocabulary
    assert launch.tiles * 256 >= share


def test_a_cluster_is_bound_once(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from ..solution import cluster

    bound = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cluster, "code", lambda *_: b"")
    monkeypatch.setattr(CubinLaunch, "bind", lambda self, device: bound.append(self) or (lambda *_: None))
    (launch,) = planned(5, 128256, plans.Config("cluster", 8, 16))
    for _ in range(2):
        launch.run(*[torch.zeros(1)] * 3)
    assert [one.name for one in bound] == ["softmax_cluster_kernel"]


@pytest.mark.parametrize("vocabulary", [1001, 4 * 20 * 256 * 16 + 4])
def test_what_a_cluster_does_not_take_is_split(vocabulary):
    first, _ = planned(1, vocabulary, plans.Config("cluster", 8, 16))
    assert first.name == "parts_kernel"
