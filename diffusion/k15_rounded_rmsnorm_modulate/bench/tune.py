"""Which configurations may be chosen: `kda tune rounded_rmsnorm_modulate` times them all."""

from collections.abc import Iterator

from kda_tools.lab.tune import Sweep

from ..solution.rounded_rmsnorm_modulate import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps; then programmatic dependent launch off."""
    for warps in (1, 2, 4):
        yield Config(warps)
        yield Config(warps, pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 4_000_000}, {})),)
