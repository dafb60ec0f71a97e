"""Which configurations may be chosen: `kda tune temb_modulation` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.temb_modulation import ALL, TUNED, Config


def grid() -> Iterator[Config]:
    """Rows of a program with the order of loads; then the settings that do not depend on these.

    At 4 warps 3072 columns are 3 whole chunks and 5120 are 5; 8 warps would be lowered to 4, and 2 raised to 4.
    """
    for rows in (1, 2):
        for early, store in product((False, True), ("", ".cs")):
            yield Config(4, rows, early=early, store=store)
        yield Config(4, rows, ahead=1, store=".cs")
    yield Config(4, pdl=False)
    for load in (".cg", ".ca"):
        yield Config(4, load=load, store=".cs")
    for maxnreg, ahead in ((96, ALL), (80, ALL), (80, 1)):
        yield Config(4, ahead=ahead, store=".cs", maxnreg=maxnreg)


def applies(config: Config, features: Features) -> bool:
    """Whether a row times `config`. `ahead` is only for shift and scale, and where one slice is read it is the gate."""
    return features["slices"] != 1 or config.ahead == ALL


LINES = ({"streamed": 0}, {"slices": 1, "streamed": 2}, {"slices": 1}, {"slices": 2, "streamed": 4}, {"slices": 2}, {})
SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=LINES, applies=applies),)
