"""Which configurations may be chosen: `kda tune temperature_softmax` times them all."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.plans import TUNED, Config

CLUSTERS = ((8, 16), (16, 16), (32, 16), (4, 16), (8, 8), (16, 8), (32, 8), (32, 4))
"""(warps, blocks)."""
SPLITS = ((4, 2048), (4, 4096), (8, 4096), (8, 8192), (8, 16384))
"""(warps, elements)."""
FEW = 4_000_000
"""Bytes up to which reading logits twice costs little, and every multiprocessor counts."""


def grid() -> Iterator[Config]:
    """Clusters and the two launches, in every cut, with both stores."""
    for (warps, blocks), store in product(CLUSTERS, ("", ".cs")):
        yield Config("cluster", warps, blocks, store=store)
    for (warps, blocks), store in product(((8, 16), (16, 8)), ("", ".cs")):
        yield Config("cluster", warps, blocks, store=store, pdl=False)
    for (warps, elements), store in product(SPLITS, ("", ".cs")):
        yield Config("split", warps, elements=elements, store=store)


def applies(config: Config, features: Features) -> bool:
    """Clusters only if the DSL is installed; small parts only for few bytes."""
    if config.method == "cluster":
        return find_spec("cutlass") is not None
    return config.elements >= 4096 or features["bytes"] <= FEW


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        applies=applies,
        lines=({"bytes": FEW}, {"bytes": 32_000_000}, {"bytes": 90_000_000}, {}),
        in_graphs=True,  # `split` is two launches, a cluster one
    ),
)
