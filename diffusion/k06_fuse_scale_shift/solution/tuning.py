"""How the two kernels cut their work, and the tables that choose it."""

from collections.abc import Mapping
from dataclasses import dataclass

VECTOR_BYTES = 16
"""A load or store of one thread."""


@dataclass(frozen=True)
class Config:
    """A tile is as many channels as the program's threads hold in one 16-byte vector of x each, over all its rows."""

    warps: int
    rows: int = 1
    """Scale and shift: rows of a tile that a thread has a vector of each, so the loads in flight. select01: rows of x
    per program, with warps / rows warps each; equal to `warps`, a row stays within one warp."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = True
    """select01 only: scale, shift and gate are loaded before the statistics instead of behind them."""


@dataclass(frozen=True)
class Choice:
    """One line of a tuning table."""

    max_elements: float
    """Largest number of elements of x that the line is for."""
    config: Config
    reason: str


Table = Mapping[int, tuple[Choice, ...]]
"""Compute capability's major number -> lines in ascending order of elements."""

# NVIDIA H200, 2026-11-20, device us.
SCALE_SHIFT: Table = {
    9: (
        Choice(4_000_000, Config(warps=2, rows=2), "47 x 3072: 0.90, against 0.98 with 4 warps and 1 row; copy 0.83"),
        Choice(
            float("inf"),
            Config(warps=4, rows=1, store=".cs"),
            "27030 x 3072: 114.6, against 115.0 with 4 rows, 114.8 without .cs, 115.2 without PDL; copy 118.0",
        ),
    ),
}
SELECT01: Table = {
    9: (
        Choice(
            float("inf"),
            Config(warps=4),
            "8424 x 3072: 39.6, against 40.0 with .cs, 40.1 late with .cs, 40.6 late without PDL; copy 37.9",
        ),
    ),
}
DEFAULT = 9
"""The line set used on devices without their own (B200, capability 10, is compiled but not measured)."""


def select(table: Table, elements: int, capability: int) -> Config:
    """The configuration for this many elements of x on a device of this compute capability (major number)."""
    lines = table.get(capability, table[DEFAULT])
    return next(line.config for line in lines if elements <= line.max_elements)
