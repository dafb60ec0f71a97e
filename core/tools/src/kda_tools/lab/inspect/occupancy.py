"""How many blocks of a kernel a multiprocessor holds at once, and what keeps it from holding more.

    blocks = min(by registers, by shared memory, by warps, by block slots)

The rules are those of NVIDIA's `cuda_occupancy.h`, the sizes those of the CUDA C++ Programming Guide, "Compute
Capabilities", table "Technical Specifications per Compute Capability". Clusters are not considered: a cluster's blocks
have to fit at the same time into one GPC, which may leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

WARP = 32
PARTITIONS = 4
"""Parts of a multiprocessor, each with a quarter of the registers; a warp's registers lie in one part."""
REGISTER_UNIT = 256
"""A warp gets registers in multiples of this: 8 a thread."""
SHARED_UNIT = 128
"""A block gets bytes of shared memory in multiples of this."""
RESERVED_BYTES = 1024
"""Bytes at the beginning of every block's shared memory that the system uses."""


class Resource(str, Enum):
    """What a multiprocessor can run out of. If several run out together, the first in this order counts."""

    REGISTERS = "regs"
    SHARED = "smem"
    WARPS = "warps"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has."""

    bytes_in_flight: int
    """Bytes that loads have to keep on the way for memory to be busy: bandwidth x latency under load, an estimate. It
    is what NVIDIA's CUB asks of its streaming kernels, tuned on these GPUs (cccl, `cub/device/dispatch/tuning/
    tuning_transform.cuh`, `arch_to_min_bytes_in_flight`)."""
    warps: int = 64
    blocks: int = 32
    block_threads: int = 1024
    registers: int = 64 * 1024
    shared_bytes: int = 228 * 1024


MULTIPROCESSORS: Mapping[str, Multiprocessor] = {
    "9.0": Multiprocessor(bytes_in_flight=48 * 1024),  # H200; an H100 needs 32
    "10.0": Multiprocessor(bytes_in_flight=64 * 1024),  # B200
}
"""By compute capability."""


@dataclass(frozen=True)
class Occupancy:
    """How much is resident on a multiprocessor at once, if the grid has enough blocks."""

    blocks: int
    """Resident blocks; 0 if not even one fits."""
    warps: int
    limit: Resource
    """The resource that is too small for another block."""


def multiprocessor(target: str) -> Multiprocessor | None:
    """The multiprocessor of a target such as `sm_90a`; None if its sizes are not known here."""
    digits = "".join(filter(str.isdigit, target))
    return MULTIPROCESSORS.get(f"{digits[:-1]}.{digits[-1:]}")


def occupancy(sm: Multiprocessor, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Resident blocks of `threads` threads that take `registers` each and `shared_bytes` a block."""
    warps = _up(threads, WARP) // WARP
    most = {
        Resource.REGISTERS: _by_registers(sm, warps, registers),
        Resource.SHARED: sm.shared_bytes // _up(shared_bytes + RESERVED_BYTES, SHARED_UNIT),
        Resource.WARPS: sm.warps // warps if threads <= sm.block_threads else 0,
        Resource.BLOCKS: sm.blocks,
    }
    limit = min(most, key=lambda resource: most[resource])
    return Occupancy(most[limit], most[limit] * warps, limit)


def _by_registers(sm: Multiprocessor, warps: int, registers: int) -> int:
    a_warp = max(REGISTER_UNIT, _up(registers * WARP, REGISTER_UNIT))
    # A block starts only if it would fit with its warps spread evenly.
    if a_warp * _up(warps, PARTITIONS) > sm.registers:
        return 0
    return sm.registers // PARTITIONS // a_warp * PARTITIONS // warps


def _up(value: int, unit: int) -> int:
    """`value`, or the next multiple of `unit`."""
    return -(-value // unit) * unit
