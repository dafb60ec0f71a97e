"""The cluster's launch; its kernel is executed in `test_ptx.py`, and on a GPU in `test_kernel.py`."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from kda_runtime.bound import bind
from kda_runtime.cubin import CubinLaunch, kernel_name
from kda_runtime.launch import MISS, Chain, Launch
from kda_runtime.plans import plain_entry
from kda_tools.lab.inspect.aot import resources

from ..solution import dsl
from ..solution.cluster import RESIDENT_WARPS, ClusterLaunch
from ..solution.dsl import divisor
from ..solution.plans import CLUSTER_TILES, Config
from .cases import make, normal

REGISTERS = 65536
"""Of a multiprocessor."""
FLOAT16, BFLOAT16, FLOAT32 = (torch.float16,) * 3, (torch.bfloat16,) * 3, (torch.float32,) * 3


def described(dtypes=FLOAT16, blocks=8, warps=8, tiles=1, otherwise=None):
    """Of x [2, 8, 4, 16] with 4 groups."""
    config = Config("cluster", warps, tiles, blocks=blocks)
    return ClusterLaunch(dtypes, (2 * 8, 8, 8, 4, 2), 0.5, config, otherwise or Chain((), ()))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("dtypes", "blocks", "warps", "tiles"),
    [
        (BFLOAT16, 8, 16, 8),
        (FLOAT16, 8, 8, 12),
        (FLOAT16, 16, 16, CLUSTER_TILES),
        (BFLOAT16, 4, 8, CLUSTER_TILES),
        (FLOAT32, 8, 8, 12),
        (FLOAT32, 16, 16, CLUSTER_TILES),
    ],
)
def test_blocks_find_room_without_spills(target, dtypes, blocks, warps, tiles):
    cubin = described(dtypes, blocks, warps, tiles).compile(target).cubin
    registers, shared, spilled = resources(cubin)
    resident = next(held for most, held in RESIDENT_WARPS if tiles <= most)
    assert 0 < registers <= REGISTERS // (32 * (resident // warps * warps))
    assert (shared, spilled) == (0, 0)
    assert kernel_name(cubin).startswith(b"kernel_cutlass_cluster_kernel")


@pytest.mark.parametrize("by", [1, 2, 3, 5, 7, 8, 12, 1000, 1009, 2**15 - 1, 2**15, 2**27 - 1, 2**27, 2**30])
def test_division_is_exact(by):
    factor, shift = divisor(by)
    assert factor < 2**32
    near = [by * quotient + rest for quotient in (0, 1, 2, 3, 77, (2**31 - 1) // by) for rest in (-1, 0, 1)]
    for number in [*near, *range(0, 2**31, 2**31 // 997), 2**31 - 1]:
        if 0 <= number < 2**31:
            assert 2 * number * factor >> 32 >> shift == number // by, number


def test_numbers_of_a_launch():
    launch = described().with_code(b"")
    numbers = [int.from_bytes(param, "little") for param in launch.params[4:-1]]
    factor, shift = divisor(8)
    assert numbers == [16, factor, shift, 4, 2]  # vectors, channels of 8 of them, groups, channels of a group
    assert (launch.grid, launch.threads, launch.cluster, launch.dependent) == ((64, 1, 1), 256, 8, True)
    assert launch.dynamic_shared_bytes == 4 * (2 * 8 + 2 * 8 + 2 + 2 * 2)


def test_one_compilation_serves_all_sizes():
    config = Config("cluster", 8, 1, blocks=8)
    one, other = described(), ClusterLaunch(FLOAT16, (100, 10, 3, 3, 10), 1e-6, config, Chain((), ()))
    assert one != other
    assert (one.variant, one.constants) == (other.variant, other.constants)
    assert described(tiles=2).variant != one.variant
    assert described(BFLOAT16).variant != one.variant


@pytest.fixture
def bound(monkeypatch):
    """The launches that are bound, and what they are called with."""
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(dsl, "code", lambda kind, constants, target: f"{kind} {constants} {target}".encode())
    monkeypatch.setattr(CubinLaunch, "bind", lambda self, device: lambda *given: seen.append((self, device, given)))
    return seen


def test_call_is_one_launch(bound):
    x, weight, bias = make((2, 8, 4, 16))
    chain = Chain((described(),), ((0, 1, 2, 3),), (0,))
    entry = plain_entry(chain, (x, weight, bias), (4, 0.5))
    y = entry(x, weight, bias, 4, 0.5)
    ((launch, _, given),) = bound
    assert given == tuple(tensor.data_ptr() for tensor in (y, x, weight, bias))
    assert launch.name == "cluster_kernel"
    assert launch.cubin.endswith(b"sm_90a")
    assert entry(normal(2, 8, 64), weight, bias, 4, 0.5) is MISS
    entry(x, weight, bias, 4, 0.5)
    assert bound[1][0] is launch, "what was bound is launched again"
    bind(*chain.launches, device=0)(1, 2, 3, 4)
    assert bound[2][1:] == (0, (1, 2, 3, 4))


def test_tensors_are_launched_by_their_addresses(bound):
    tensors = make((2, 8, 4, 16))
    described().run(torch.empty_like(tensors[0]), *tensors)
    assert bound[0][2][1:] == tuple(tensor.data_ptr() for tensor in tensors)


def test_misaligned_x_is_left_to_another_chain(monkeypatch):
    seen = []
    monkeypatch.setattr(Launch, "run_at", lambda _, *given: seen.append(given))
    other = Chain((Launch(None, (1, 1, 1), (), {}, {}),), ((0, 2, 3, 1),), (0,))
    described(otherwise=other).with_code(b"").otherwise(16, 2, 32, 48)
    assert seen == [(16, 32, 48, 2)]
