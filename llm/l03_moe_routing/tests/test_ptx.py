"""The alignment as compiled for sm_90a, executed on the CPU by the PTX machine."""

import pytest
import torch

from kda_tools.lab.ptx.kernels import on_the_machine
from kda_tools.lab.ptx.run import Options

from ..solution import moe_align
from .cases import ALIGN, TASK, align_arguments, check

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

ALL = {
    "pad_sorted_token_ids": True,
    "write_inactive_prefix_count": True,
    "map_invalid_experts_to_sentinel": True,
    "pad_expert_ids": True,
}
CASES = {
    # The configuration has warps, blocks and clusters. Then come tokens, k, experts, block_size, flags.
    "one pair": ((1, 1, 1), 1, 1, 4, 16, ALL),
    "one warp holds several buckets a thread": ((1, 1, 1), 9, 8, 128, 16, ALL),
    "a warp of which the last scans nothing": ((5, 1, 1), 33, 8, 128, 16, {"pad_sorted_token_ids": True}),
    "several pairs a thread": ((2, 1, 1), 50, 8, 60, 7, ALL),
    "nothing is padded": ((2, 1, 1), 50, 8, 60, 16, {}),
    "a cluster": ((4, 4, 1), 100, 8, 128, 16, ALL),
    "a cluster that pads nothing": ((4, 4, 1), 100, 8, 128, 16, {}),
    "most blocks of a cluster have no pair": ((8, 8, 1), 3, 8, 32, 64, ALL),
    "a large cluster": ((16, 16, 1), 130, 8, 300, 16, {"pad_sorted_token_ids": True}),
    "two blocks, several pairs a thread": ((2, 2, 1), 120, 4, 128, 64, {"pad_sorted_token_ids": True}),
    "four clusters of one block": ((4, 1, 4), 100, 8, 128, 16, ALL),
    "four clusters of one block that pad nothing": ((4, 1, 4), 100, 8, 128, 16, {}),
    "two clusters of two blocks": ((2, 2, 2), 120, 4, 60, 64, ALL),
    "more clusters than buckets": ((2, 2, 8), 20, 2, 5, 16, ALL),
}


def run(config, tensors, scalars, options=Options()):  # noqa: B008  it is frozen
    with moe_align.TUNED.forced(config), on_the_machine(TASK, options) as launched:
        check(ALIGN, tensors, **scalars)
    assert [launch.name for launch in launched] == ["align_kernel"]
    (launch,) = launched
    return launch


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [Options(), Options(late=False, apart=True)], ids=["late", "apart"])
def test_alignment(case, dtype, options):
    config, tokens, k, experts, block, flags = CASES[case]
    low, high = (-3, experts + 5) if flags.get("map_invalid_experts_to_sentinel") else (-1, experts)
    ids = torch.randint(low, high, (tokens, k), generator=torch.Generator().manual_seed(1)).to(dtype)
    tensors = align_arguments(ids, experts + 1, block, slack=9, counts=2)
    scalars = {"num_experts": experts + 1, "block_size": block, **flags}
    launch = run(moe_align.Config(*config), tensors, scalars, options)
    _, blocks, clusters = config
    assert f"blocks={blocks} clusters={clusters} " in launch.variant


def test_one_expert_has_all_pairs():
    ids = torch.full((60, 8), 3, dtype=torch.int32)
    scalars = {"num_experts": 129, "block_size": 16, "pad_sorted_token_ids": True}
    for config in (moe_align.Config(4), moe_align.Config(4, 4)):
        run(config, align_arguments(ids, 129, 16), scalars)


def test_addresses_need_no_alignment():
    ids = torch.randint(0, 128, (1 + 9 * 8,), generator=torch.Generator().manual_seed(1)).int()[1:].view(9, 8)
    tensors = align_arguments(ids, 129, 16)
    tensors = {n: t if t is ids else torch.zeros(t.numel() + 1, dtype=t.dtype)[1:] for n, t in tensors.items()}
    run(moe_align.Config(4), tensors, {"num_experts": 129, "block_size": 16, "pad_sorted_token_ids": True})
