"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

from types import SimpleNamespace

import pytest
import torch

from kda_runtime.cubin import CubinLaunch

from ..baseline import eager
from ..solution import launches, moe_align, moe_align_block_size, moe_topk_sum, topk, topk_softmax, why_not
from .cases import ALIGN, SUM, TOPK, align_arguments, check, normal, sum_arguments, topk_arguments

IDS = torch.tensor([[0, 3], [3, -1], [3, 2]], dtype=torch.int32)
arms = pytest.mark.parametrize("arm", [None, eager], ids=["plain path", "eager"])


def call(op, tensors, arm, **scalars):
    check(op, tensors, **({"arm": arm} if arm else {}), **scalars)


# --- the plain path and the eager arm


@arms
@pytest.mark.parametrize("scalars", [{}, {"renormalize": True}, {"moe_softcapping": 3.0}], ids=str)
def test_topk(arm, scalars):
    bias = normal(60, dtype=torch.float32)
    call(TOPK, topk_arguments(normal(5, 60), 7), arm, **scalars)
    call(TOPK, topk_arguments(normal(5, 60, dtype=torch.float32), 7, bias), arm, **scalars)


def test_topk_of_equal_logits_takes_the_first():
    tensors = topk_arguments(torch.zeros(2, 300), 3)
    topk_softmax(**tensors)
    assert tensors["topk_ids"].tolist() == [[0, 1, 2]] * 2


@arms
@pytest.mark.parametrize("pad", [False, True])
def test_align(arm, pad):
    flags = {"pad_sorted_token_ids": pad, "pad_expert_ids": pad, "write_inactive_prefix_count": True}
    tensors = align_arguments(IDS, 5, 4, slack=8, counts=2)
    call(ALIGN, tensors, arm, num_experts=5, block_size=4, **flags)
    # One pair of -1, one of 0, one of 2, three of 3: four blocks, the first of which is nobody's.
    assert tensors["num_tokens_post_pad"].tolist() == [16, 1]
    assert tensors["expert_ids"].tolist()[:4] == [-1, 0, 2, 3]


@arms
def test_ids_outside_of_the_range(arm):
    ids = torch.tensor([[0, 99], [-7, 2]], dtype=torch.int64)
    scalars = {"num_experts": 4, "block_size": 2, "map_invalid_experts_to_sentinel": True}
    call(ALIGN, align_arguments(ids, 4, 2), arm, **scalars)


def test_align_without_pairs():
    tensors = align_arguments(IDS[:0], 5, 4, slack=8)
    moe_align_block_size(**tensors, num_experts=5, block_size=4, pad_sorted_token_ids=True)
    assert tensors["num_tokens_post_pad"].tolist() == [0]


@arms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum(arm, dtype):
    call(SUM, sum_arguments(normal(5, 3, 40, dtype=dtype)), arm)


# --- what the kernels do not cover


def uncovered(op, tensors, **scalars):
    with torch.no_grad():
        return op(**tensors, **scalars)


def test_what_the_top_k_does_not_cover():
    wide = topk_arguments(normal(2, 2048), 4)
    for tensors, reason in (
        (topk_arguments(normal(2, 128, dtype=torch.float64), 4), "gating_output has dtype torch.float64"),
        (topk_arguments(normal(128, 2).T, 4), "gating_output is not contiguous"),
        (wide, "2048 experts; the kernel takes up to 1024"),
    ):
        assert launches(TOPK, {n: t for n, t in tensors.items() if t is not None}, {}) == []
        assert reason in topk._uncovered(topk.Call(*tensors.values(), False, 0.0))
        if tensors["gating_output"].dtype != torch.float64:
            check(TOPK, tensors)


@pytest.mark.parametrize(
    ("change", "scalars", "reason"),
    [
        ({"topk_ids": IDS.short()}, {}, "topk_ids has dtype torch.int16"),
        ({"topk_ids": IDS.T.contiguous().T}, {}, "topk_ids is not contiguous"),
        ({"topk_ids": IDS[:0]}, {}, "topk_ids is empty"),
        ({}, {"num_experts": 1025}, "num_experts is 1025; the kernel takes up to 1024"),
    ],
)
def test_what_the_alignment_does_not_cover(change, scalars, reason):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    tensors = align_arguments(IDS, 5, 4) | change
    call_ = moe_align.Call(
        *(tensors[name] for name in moe_align.Call._fields[:5]), scalars.get("num_experts", 5), 4, *[False] * 4
    )
    assert reason in moe_align._uncovered(call_)
    assert launches(ALIGN, tensors, {"num_experts": 5, "block_size": 4} | scalars) == []
    check_these = tensors if tensors["topk_ids"].numel() else None
    if check_these and scalars == {} and tensors["topk_ids"].dtype == torch.int32:
        check(ALIGN, tensors, num_experts=5, block_size=4)


def test_alignment_needs_a_gpu_with_clusters(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    ids = SimpleNamespace(is_cuda=True, dtype=torch.int32, numel=lambda: 8)
    call_ = moe_align.Call(**dict.fromkeys(moe_align.Call._fields))._replace(topk_ids=ids, num_experts=5)
    monkeypatch.setattr(moe_align, "capability", lambda _: 8)
    assert moe_align._uncovered(call_) == "the GPU has compute capability 8; the kernel takes 9 and up"
    monkeypatch.setattr(moe_align, "capability", lambda _: 10)
    assert moe_align._uncovered(call_) is None


def test_what_the_sum_does_not_cover():
    assert "40 experts a token" in str(_why_not_sum(normal(2, 40, 8)))
    assert "x is not contiguous" in str(_why_not_sum(normal(2, 8, 4).transpose(1, 2)))
    check(SUM, sum_arguments(normal(2, 40, 8)))


def _why_not_sum(x):
    from ..solution import topk_sum

    return topk_sum._uncovered(topk_sum.Call(torch.empty(x.shape[0], x.shape[2], dtype=x.dtype), x))


# --- what has no meaning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gating_output": normal(128)}, r"gating_output: expected two dimensions \[tokens, experts\], got \[128\]"),
        ({"topk_ids": torch.zeros(2, 8).int()}, r"topk_ids: expected shape \[3, k\], k from 1 to 128, got \[2, 8\]"),
        ({"topk_ids": torch.zeros(3, 8).long()}, "topk_ids: expected dtype torch.int32, got torch.int64"),
        ({"topk_weights": torch.zeros(3, 7)}, r"topk_weights: expected shape \[3, 8\], as topk_ids, got \[3, 7\]"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias: expected shape \[128\], got \[7\]"),
    ],
)
def test_meaningless_arguments_of_the_top_k(change, message):
    with pytest.raises(ValueError, match=f"topk_softmax: {message}"):
        topk_softmax(**topk_arguments(normal(3, 128), 8) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected a positive number, one more than there are experts, got 0"),
        ({"block_size": 0}, "block_size: expected a positive number, got 0"),
        (
            {"sorted_token_ids": torch.zeros(5).int()},
            "sorted_token_ids: expected 6 elements or more, as topk_ids has, got 5",
        ),
        ({"expert_ids": torch.zeros(9).long()}, "expert_ids: expected dtype torch.int32, got torch.int64"),
        ({"write_inactive_prefix_count": True}, "num_tokens_post_pad: expected 2 elements or more, got 1"),
    ],
)
def test_meaningless_arguments_of_the_alignment(change, message):
    arguments = align_arguments(IDS, 5, 4) | {"num_experts": 5, "block_size": 4} | change
    with pytest.raises(ValueError, match=f"moe_align_block_size: {message}"):
        moe_align_block_size(**arguments)


def test_meaningless_arguments_of_the_sum():
    with pytest.raises(ValueError, match=r"moe_topk_sum: x: expected three dimensions .*, got \[2, 8\]"):
        moe_topk_sum(normal(2, 8), normal(2, 8))
    with pytest.raises(ValueError, match=r"moe_topk_sum: out: expected shape \[2, 8\], got \[2, 9\]"):
        moe_topk_sum(normal(2, 3, 8), normal(2, 9))
    with pytest.raises(ValueError, match=r"moe_topk_sum: out: expected dtype .*bfloat16, as x, got .*float32"):
        moe_topk_sum(normal(2, 3, 8), normal(2, 8, dtype=torch.float32))


# --- how calls become launches


@pytest.mark.parametrize(
    ("experts", "lanes", "item", "want"),
    [
        (128, 16, 2, (128, 16, 8)),
        (128, 4, 4, (128, 4, 4)),
        (60, 16, 2, (64, 8, 8)),
        (3, 16, 2, (8, 1, 8)),
        (256, 16, 2, (256, 16, 8)),
    ],
)
def test_a_lane_has_eight_experts_or_more(experts, lanes, item, want):
    assert topk.cut(experts, lanes, item) == want


@pytest.mark.parametrize(
    ("pairs", "config", "want"),
    [
        (8, moe_align.Config(8), (1, 8, 1)),
        (8192, moe_align.Config(8), (16, 16, 1)),
        (65536, moe_align.Config(32), (16, 32, 4)),
        (65536, moe_align.Config(32, 16), (4, 32, 16)),
        (1000, moe_align.Config(2, 2), (8, 2, 2)),
        (262144, moe_align.Config(4), (16, 32, 16)),
    ],
)
def test_every_pair_has_a_thread(pairs, config, want):
    assert moe_align.cut(pairs, config) == want
    items, warps, blocks = want
    assert items * warps * 32 * blocks >= pairs
    assert blocks <= warps


def test_a_device_without_room_for_sixteen_blocks_takes_eight(monkeypatch):
    """A slice of a GPU may not hold more; `test_ptx.py` runs such clusters."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(moe_align, "capability", lambda _: 9)
    ids = torch.zeros((600, 8), dtype=torch.int32, device="meta")
    call_ = moe_align.Call(*[ids] * 5, 300, 16, *[True] * 4)

    def planned(blocks):
        with moe_align.TUNED.forced(moe_align.Config(16, blocks)):
            return moe_align.plan(call_).launches[0]

    assert planned(16).narrow() == planned(8)
    assert planned(16).with_code(b"").otherwise.__self__ == planned(8)
    assert planned(8).with_code(b"").otherwise is None


def test_a_cluster_is_bound_once(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from ..solution import align_kernel

    bound = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(align_kernel, "code", lambda *_: b"")
    monkeypatch.setattr(CubinLaunch, "bind", lambda self, device: bound.append(self) or (lambda *_: None))
    chain = moe_align.plan(moe_align.Call(*[torch.zeros(8, dtype=torch.int32)] * 5, 5, 4, *[False] * 4))
    for _ in range(2):
        chain.run(*[torch.zeros(8, dtype=torch.int32)] * 4)
    assert [launch.name for launch in bound] == ["align_kernel"]


def test_why_not_takes_keywords():
    tensors = align_arguments(IDS, 5, 4)
    assert " is on cpu; " in why_not(ALIGN, **tensors, num_experts=5, block_size=4)
