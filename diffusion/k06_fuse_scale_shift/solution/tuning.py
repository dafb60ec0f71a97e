"""How the two kernels cut their work, and the tables that choose it."""

from dataclasses import dataclass

from kda_core.tuning import Table


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


SCALE_SHIFT = Table(__file__, "scale_shift", Config)
SELECT01 = Table(__file__, "select01", Config)
"""Both by elements of x."""
