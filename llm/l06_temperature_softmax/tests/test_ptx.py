"""The cluster's kernel as compiled for sm_90a, executed on the CPU by the PTX machine."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from kda_tools.lab.inspect.aot import resources
from kda_tools.lab.ptx.cute import run_cute
from kda_tools.lab.ptx.run import Options

from ..solution import plans
from ..solution.cluster import RESIDENT_WARPS, ClusterLaunch
from .cases import assert_matches, make

REGISTERS = 65536
"""Of a multiprocessor."""
CUTS = {
    # warps, blocks, rows, vocabulary, dtype, gap between rows, whether there are temperatures, cache modifier
    "all blocks full": (1, 4, 2, 4 * 32 * 4, torch.float32, 0, True, ""),
    "the last block has less": (2, 4, 3, 4 * 300, torch.float32, 8, True, ""),
    "the last block has nothing": (1, 8, 1, 4 * 33 * 4, torch.bfloat16, 0, True, ".cs"),
    "one vector": (4, 16, 2, 4, torch.float32, 0, True, ""),
    "several vectors a thread": (1, 2, 2, 4 * 32 * 2 * 3 - 4, torch.bfloat16, 4, True, ""),
    "as many tiles as there may be": (1, 2, 1, 2 * 4 * 32 * plans.TILES, torch.float16, 0, True, ""),
    "no temperatures": (1, 16, 2, 4 * 32 * 17, torch.float32, 0, False, ".cs"),
    "sixteen blocks of many warps": (8, 16, 1, 4 * 256 * 16 + 100, torch.bfloat16, 0, True, ""),
}


def launch_of(logits, temperatures, warps, blocks, store=""):
    """The cluster's launch, as the plan makes it."""
    config = plans.Config("cluster", warps, blocks, store=store)
    like = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    with plans.TUNED.forced(config):
        (launch,) = plans.plan(plans.Call(like, temperatures)).launches
    assert isinstance(launch, ClusterLaunch)
    return launch


def run(logits, temperatures, *cut, options=()):
    given = [logits] if temperatures is None else [logits, temperatures]
    launch = launch_of(logits, temperatures, *cut)
    results = []
    for one in options or (Options(),):
        p = torch.full(logits.shape, float("nan"))
        run_cute(launch, p, *given, options=one)
        results.append(p)
    return results


@pytest.mark.parametrize("cut", CUTS)
def test_cluster(cut):
    warps, blocks, rows, vocabulary, dtype, gap, heated, store = CUTS[cut]
    logits, temperatures = make(rows, vocabulary + gap, dtype)
    logits = logits[:, :vocabulary]
    temperatures = temperatures if heated else None
    options = (Options(), Options(late=False, apart=True), Options(error=1), Options(error=-1))
    results = run(logits, temperatures, warps, blocks, store, options=options)
    for p in results:
        assert_matches(p, logits, temperatures)
    assert torch.equal(results[0], results[1]), "whenever blocks run, and what they send arrives"


def test_what_has_no_probabilities_is_nan_as_in_pytorch():
    logits, temperatures = make(8, 400)
    logits[0] = float("-inf")
    logits[1, 5] = float("inf")
    logits[2, 5] = float("nan")
    temperatures[3], temperatures[4] = 0, float("nan")
    logits[5, :300] = float("-inf")  # all of some blocks
    temperatures[6] = -temperatures[6]
    temperatures[7] = float("inf")
    (p,) = run(logits, temperatures, 1, 4)
    assert p[:5].isnan().all()
    assert (p[5, :300] == 0).all()
    assert_matches(p[5:7], logits[5:7], temperatures[5:7])
    torch.testing.assert_close(p[7], torch.full_like(p[7], 1 / 400))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("dtype", "warps", "blocks", "vocabulary"),
    [
        (torch.float32, 8, 16, 151936),
        (torch.float32, 16, 8, 151936),
        (torch.bfloat16, 16, 16, 151936),
        (torch.float32, 16, 16, 151936),
        (torch.bfloat16, 32, 16, 128256),
        (torch.float32, 32, 8, 151936),
        (torch.bfloat16, 32, 4, 128256),
        (torch.float32, 4, 16, 151936),
    ],
)
def test_blocks_find_room_without_spills(target, dtype, warps, blocks, vocabulary):
    logits = torch.empty(1, vocabulary, dtype=dtype, device="meta")
    launch = launch_of(logits, torch.empty(1, 1, device="meta"), warps, blocks)
    registers, shared, spilled = resources(launch.compile(target).cubin)
    resident = next(held for most, held in RESIDENT_WARPS if launch.tiles <= most)
    assert 0 < registers <= REGISTERS // (32 * max(resident, warps))
    assert (shared, spilled) == (0, 0)
