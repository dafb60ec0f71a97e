"""The parts of a run: grid, tensors, parameters, the kernel ahead, and what the ISA leaves open."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kda_tools.lab.ptx.parse import Program, PtxError

Array = np.ndarray
WARP = 32
"""Threads of a warp."""
TARGET = "sm_90a"
"""The target that kernels are compiled for."""


@dataclass(frozen=True)
class Shape:
    """Grid, cluster and block of a run, in blocks, blocks and threads."""

    grid: tuple[int, int, int]
    cluster: int
    threads: int
    first: int = 0
    """Number of the first block of those that run together."""


@dataclass(frozen=True)
class Region:
    """The storage of a tensor."""

    base: int
    data: Array  # uint8

    @staticmethod
    def of(tensor: torch.Tensor) -> "Region":
        """The whole storage that a tensor on the CPU views, shared and not copied."""
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        return Region(storage.data_ptr(), flat.numpy())


class Traffic:
    """Which bytes of tensors a kernel has read and written, and which blocks have held back the kernel behind."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.marks = {
            (region.base, stores): np.zeros(-(-region.data.size // 16) * 16, np.uint8)
            for region in regions
            for stores in (False, True)
        }
        self.holding: set[int] = set()
        """Blocks that have waited for the kernel ahead."""
        self.eager: set[int] = set()
        """Blocks that have let the kernel behind begin before they waited for the kernel ahead."""

    def add(self, base: int, stores: bool, offsets: Array, width: int) -> None:
        """Note accesses of `width` bytes each."""
        word = min(width, 8)
        marks = self.marks[base, stores].view(f"u{word}")
        for i in range(width // word):
            marks[offsets // word + i] = np.iinfo(marks.dtype).max

    def meets(self, base: int, stores: bool, offsets: Array, width: int) -> Array:
        """Which of another kernel's accesses touch bytes that this one writes or, if they are stores, reads."""
        at, met = offsets[:, None] + np.arange(width), np.zeros(len(offsets), bool)
        for kind in (True, False) if stores else (True,):
            marks = self.marks.get((base, kind), np.zeros(0, np.uint8))
            # Bytes after the end belong to a larger tensor, which now has the place of this kernel's tensor.
            met |= np.take(np.append(marks, 0), at, mode="clip").any(axis=1)
        return met


@dataclass(frozen=True)
class Ahead:
    """The kernel ahead. With programmatic dependent launch it may still run until the kernel waits for it."""

    runs: bool
    """Whether it may still run."""
    traffic: Traffic | None = None
    """Its accesses; None if they are not known, so that it may access anything."""


ENDED = Ahead(runs=False)


@dataclass(frozen=True)
class Options:
    """What the ISA leaves open."""

    late: bool = True
    """Whether asynchronous copies arrive as late as they may; else they arrive at once."""
    apart: bool = False
    """Whether every block runs alone as far as it can; else all of them run side by side."""
    turns: int | None = None
    """Seed of a random order in which blocks run alone, each up to the end of a basic block. So no block waits for
    ever, not even for one that has not begun."""
    error: int = 0
    """-1 or 1: approximate instructions are off by the largest relative error that they may have; 0: not at all."""


DEFAULT = Options()


@dataclass(frozen=True)
class Run:
    """One launch of a kernel."""

    program: Program
    shape: Shape
    regions: tuple[Region, ...]
    """The tensors' storages: all of the global memory that there is."""
    params: bytes
    dynamic_shared_bytes: int
    ahead: Ahead
    traffic: Traffic
    options: Options


def pack_params(program: Program, values: Sequence[bytes]) -> bytes:
    """The parameter space with these values; a structure's value may lack the padding at its end."""
    packed = bytearray()
    for param, value in zip(program.params, values, strict=True):
        if not 0 <= param.size - len(value) < 8:
            raise PtxError(f"kernel {program.name}: {param.name} has {param.size} bytes, expected {len(value)}")
        packed += bytes(param.offset - len(packed)) + value.ljust(param.size, b"\0")
    return bytes(packed)
