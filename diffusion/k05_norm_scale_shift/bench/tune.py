"""Which configurations may be chosen: `kda tune norm_scale_shift` times them all."""

from collections.abc import Iterator
from itertools import product

from diffusion.k05_norm_scale_shift.solution.norm_scale_shift import TUNED, Config
from kda_core.tune import Sweep


def grid() -> Iterator[Config]:
    """Warps and rows a program, operands early or late; masked last chunks only with many warps, for latency."""
    for warps, rows, early, store in product((4, 8, 2), (1, 2), (True, False), ("", ".cs")):
        yield Config(warps, rows, early=early, store=store)
    for warps, early in product((8, 16), (True, False)):
        yield Config(warps, whole=False, early=early)
    for early in (True, False):
        yield Config(4, early=early, pdl=False)


SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"bytes": 2**22}, {"streamed": 0}, {})),)
