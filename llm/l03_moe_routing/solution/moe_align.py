"""The pairs of a token and an expert, in the experts' order, every expert padded to whole blocks: one launch.

    bucket b = expert + 1, so that the id -1 has one, too; n[b] its pairs, p[b] = n[b] rounded up to block_size
    sorted_token_ids[start[b] + i] = the bucket's pairs, in any order        start[b] = p[0] + ... + p[b - 1]
    expert_ids[t] = b - 1 for the block_size places of block t              num_tokens_post_pad = p[0] + p[1] + ...

Source of the semantics: SGLang 0.5.23, `kernels/ops/moe/moe_align.py` (Apache-2.0); the code is our own.

Idea: upstream counts all pairs in one block of threads, and places them in a second launch by counters in global
memory. Here the old value of a counter is the pair's rank, so that pairs are read once and placed in the same launch.
One block computes a small call. A cluster computes a large one; its blocks exchange their counts once. Several of them
may count the same pairs and share the placing. `cumsum_buffer`, upstream's counters, is not needed and not touched.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from kda_runtime.checks import PDL_CAPABILITY, Expect, capability, given, is_lazy
from kda_runtime.launch import Chain
from kda_runtime.op import Op
from kda_runtime.tuned_table import Table

WARP = 32
MOST_ITEMS = 16
"""Most pairs of a thread: with their ranks they take 32 of the 64 registers that a thread has at 32 warps."""
MOST_BUCKETS = 1024
"""Most buckets: the counts of 16 blocks then take 64 KB."""
MOST_BLOCKS = 16
INTEGERS = (torch.int32, torch.int64)
CLUSTERS_FROM = 9
"""Least major number of a compute capability with clusters of blocks."""
BUFFERS = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. Calls with more pairs than `MOST_ITEMS` a thread get more warps, then more blocks."""

    warps: int = 32
    blocks: int = 1
    """Blocks of a cluster, a power of two, at most as many as warps."""
    clusters: int = 1
    """A power of two. Each counts all pairs, and places those of its share of the buckets."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "moe_align_block_size", Config)
"""Tuned configurations, chosen by `pairs` (of a token and an expert)."""


# --- plan


class Call(NamedTuple):
    """The arguments of one call: tensors in the kernel's order, which does not use the last, then scalars."""

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_pad: torch.Tensor
    topk_ids: torch.Tensor
    cumsum_buffer: torch.Tensor
    num_experts: int
    block_size: int
    pad_sorted_token_ids: bool
    write_inactive_prefix_count: bool
    map_invalid_experts_to_sentinel: bool
    pad_expert_ids: bool


def plan(call: Call) -> Chain:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    from .align_kernel import AlignLaunch  # the DSL takes a second to import

    pairs, major = call.topk_ids.numel(), capability(call.topk_ids)
    config = TUNED.select(major, pairs=pairs)
    items, warps, blocks = cut(pairs, config)
    constants = (
        call.num_experts,
        call.block_size,
        call.pad_sorted_token_ids,
        call.pad_expert_ids,
        call.write_inactive_prefix_count,
        call.map_invalid_experts_to_sentinel,
        items,
        warps,
        blocks,
        config.clusters,
        config.pdl and major >= PDL_CAPABILITY,
    )
    numbers = (pairs, call.sorted_token_ids.numel(), call.expert_ids.numel())
    launch = AlignLaunch(call.topk_ids.dtype, constants, numbers)
    return Chain((launch,), ((0, 1, 2, 3),))


def cut(pairs: int, config: Config) -> tuple[int, int, int]:
    """Pairs of a thread (a power of two, so that few kernels serve all calls), warps of a block, and blocks."""
    warps, blocks = config.warps, config.blocks
    while (items := -(-pairs // (WARP * warps * blocks))) > MOST_ITEMS:
        if warps < 32:
            warps *= 2
        elif blocks < MOST_BLOCKS:
            blocks *= 2
        else:
            break
    return 1 << (items - 1).bit_length(), warps, blocks


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.num_experts > 0, "num_experts", "a positive number, one more than there are experts", call.num_experts)
    expect(call.block_size > 0, "block_size", "a positive number", call.block_size)
    for name in BUFFERS:
        tensor = getattr(call, name)
        expect(tensor.dtype == torch.int32, name, "dtype torch.int32", tensor.dtype)
        expect(tensor.dim() == 1, name, "one dimension", list(tensor.shape))
    least = call.topk_ids.numel()
    got = call.sorted_token_ids.numel()
    expect(got >= least, "sorted_token_ids", f"{least} elements or more, as topk_ids has", got)
    counts = 1 + call.write_inactive_prefix_count
    got = call.num_tokens_post_pad.numel()
    expect(got >= counts, "num_tokens_post_pad", f"{counts} elements or more", got)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if find_spec("cutlass") is None:
        return "the CuTe DSL (nvidia-cutlass-dsl) is not installed"
    if call.topk_ids.dtype not in INTEGERS:
        return f"topk_ids has dtype {call.topk_ids.dtype}; the kernel takes int32 and int64"
    for name, tensor in given(call).items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
        if is_lazy(tensor):
            return f"{name} is a negated or conjugated view or a zero tensor: its memory does not hold its values"
    if call.topk_ids.numel() == 0:
        return "topk_ids is empty"
    if call.topk_ids.is_cuda and capability(call.topk_ids) < CLUSTERS_FROM:
        return f"the GPU has compute capability {capability(call.topk_ids)}; the kernel takes {CLUSTERS_FROM} and up"
    if call.num_experts > MOST_BUCKETS:
        return f"num_experts is {call.num_experts}; the kernel takes up to {MOST_BUCKETS}"
    most = MOST_ITEMS * WARP * 32 * MOST_BLOCKS
    if call.topk_ids.numel() > most:
        return f"topk_ids has {call.topk_ids.numel()} elements; the kernel takes up to {most}"
    return None


def _plain(call: Call) -> None:
    """The same in PyTorch, for whatever the kernel does not cover. Nothing is read back to the host."""
    device, tile, pairs = call.topk_ids.device, call.block_size, call.topk_ids.numel()
    bucket = call.topk_ids.flatten().long() + 1
    if call.map_invalid_experts_to_sentinel:
        bucket = torch.where((bucket < 0) | (bucket >= call.num_experts), 0, bucket)
    count = torch.zeros(call.num_experts, dtype=torch.int64, device=device).scatter_add_(
        0, bucket, torch.ones_like(bucket)
    )
    tiles = (count + tile - 1) // tile
    behind = tiles.cumsum(0)  # the tile after a bucket's last
    order = bucket.argsort(stable=True)
    held = bucket[order]
    rank = torch.arange(pairs, device=device) - (count.cumsum(0) - count)[held]
    if call.pad_sorted_token_ids:
        call.sorted_token_ids.fill_(pairs)
    call.sorted_token_ids[(behind - tiles)[held] * tile + rank] = order.int()
    number = torch.arange(call.expert_ids.numel(), device=device)
    owner = torch.searchsorted(behind, number, right=True) - 1
    rest = torch.full_like(call.expert_ids, -1) if call.pad_expert_ids else call.expert_ids
    call.expert_ids.copy_(torch.where(number < behind[-1], owner.int(), rest))
    call.num_tokens_post_pad[0] = behind[-1] * tile
    if call.write_inactive_prefix_count:
        call.num_tokens_post_pad[1] = tiles[0]


# --- public function

OP = Op(
    "moe_align_block_size",
    Call,
    kernel=None,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=BUFFERS,
    integers=(*BUFFERS, "topk_ids", "cumsum_buffer"),
)


@OP.public
def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,
    pad_sorted_token_ids: bool = False,
    *,
    write_inactive_prefix_count: bool = False,
    map_invalid_experts_to_sentinel: bool = False,
    pad_expert_ids: bool = False,
) -> None:
    """Order the pairs of a token and an expert by expert, every expert padded to whole blocks.

    Args:
        topk_ids: [tokens, k], int32 or int64, from -1 to num_experts - 2; a pair's number is its place here.
        num_experts: one more than there are experts: the first bucket is that of -1.
        block_size: rows of a block of the grouped GEMM.
        sorted_token_ids: int32, written: pairs by expert. It has to be large enough for the padding, too.
        expert_ids: int32, written: the expert of every block that is used.
        num_tokens_post_pad: int32, written: number of used places; with `write_inactive_prefix_count` then that of
            blocks of -1.
        cumsum_buffer: upstream's counters; not touched.
        pad_sorted_token_ids: whether all places without a pair, also those after the last, get the number of pairs.
        write_inactive_prefix_count: see `num_tokens_post_pad`.
        map_invalid_experts_to_sentinel: whether other ids count as -1; without it they are undefined.
        pad_expert_ids: whether blocks that are not used get -1.

    Other dtypes, strides and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    OP.call(
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        topk_ids,
        cumsum_buffer,
        num_experts,
        block_size,
        pad_sorted_token_ids,
        write_inactive_prefix_count,
        map_invalid_experts_to_sentinel,
        pad_expert_ids,
    )
