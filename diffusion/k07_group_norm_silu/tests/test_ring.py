"""The ring's launch; its kernel is executed in `test_ptx.py`, and on a GPU in `test_kernel.py`."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from kda_runtime.launch import Chain, Launch
from kda_tools.lab.inspect.aot import resources

from ..bench.tune import RINGS
from ..solution.dsl import divisor
from ..solution.plans import Config
from ..solution.ring import RingLaunch, shared_bytes

REGISTERS = 65536
"""Of a multiprocessor."""
SHARED_BYTES, BLOCK_BYTES = 233472, 1024
"""Shared memory of a multiprocessor, 228 KiB, and what of it a block takes beside its own."""
FLOAT16 = (torch.float16,) * 3


def described(cuts=(4, 8, 16, 3, 2), parts=3, rest=0, otherwise=None):
    """Of a group with so many parts and `rest` vectors more, 2 batches of 4 groups of 5 channels."""
    warps, tiles, resident, stages, ahead = cuts
    channel = (parts * warps * tiles * 32 + rest) // 5
    return RingLaunch(
        dtypes=FLOAT16,
        sizes=(5 * channel, channel, 8, 4, 5),
        eps=0.5,
        config=Config("ring", warps, tiles, resident=resident, stages=stages, ahead=ahead),
        otherwise=otherwise or Chain((), ()),
        blocks=7,
        patience=9,
    )


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("cuts", RINGS, ids=str)
def test_blocks_find_room(target, cuts):
    warps, _, resident, stages, ahead = cuts
    registers, static, _ = resources(described(cuts, 5).compile(target).cubin)
    blocks = resident // warps
    assert blocks * warps == resident
    assert 0 < registers <= REGISTERS // (32 * resident)
    assert static == 0
    assert blocks * (described(cuts).with_code(b"").dynamic_shared_bytes + BLOCK_BYTES) <= SHARED_BYTES
    assert 0 < ahead < stages


def test_numbers_of_a_launch():
    launch = described(parts=5, rest=40).with_code(b"")
    numbers = [int.from_bytes(param, "little") for param in launch.params[5:-1]]
    vectors = 5 * 1024 + 40
    assert numbers == [vectors, vectors // 5, *divisor(vectors // 5), 6, *divisor(6), 8, 4, 5, 9]
    assert (launch.grid, launch.threads, launch.cluster, launch.dependent) == ((7, 1, 1), 128, 1, True)
    assert launch.dynamic_shared_bytes == shared_bytes(4, 8, 3)


def test_parts_are_masked_where_not_all_are_full():
    assert described(parts=5).constants == described(parts=10).constants
    assert described(parts=5, rest=40).constants != described(parts=5).constants
    assert "even=True" in described(parts=5).variant


def test_misaligned_x_is_left_to_another_chain(monkeypatch):
    seen = []
    monkeypatch.setattr(Launch, "run_at", lambda _, *given: seen.append(given))
    other = Chain((Launch(None, (1, 1, 1), (), {}, {}),), ((0, 2, 3, 1),), (0,))
    described(otherwise=other).with_code(b"").otherwise(16, 2, 32, 48, 64)
    assert seen == [(16, 32, 48, 2)]  # without the words
