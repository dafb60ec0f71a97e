"""Which configurations may be chosen: `kda tune rotary_embedding` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_tools.lab.tune import Sweep

from ..solution import ltx2_rotary, rotary
from ..solution.common import Config

ALL_TILES = 8
"""More tiles than any row has: a program then takes all heads of its tokens."""


def grid() -> Iterator[Config]:
    """Warps, tiles and tokens; several tokens only where a program has all heads of each, so that angles are shared."""
    shapes = [(tiles, 1) for tiles in (1, 2, ALL_TILES)] + [(ALL_TILES, 2)]
    for (tiles, tokens), warps, store, pdl in product(shapes, (4, 2, 8), ("", ".cs"), (True, False)):
        yield Config(warps, tiles, tokens, pdl, store)
        if pdl and not store:
            # x is not read again, and should not push out the angles, which the next layer reads.
            yield Config(warps, tiles, tokens, load="evict_first")


def pairs(tokens: int) -> Workload:
    """A row like the frozen one, with fewer tokens: it fits into the L2 cache."""
    table = TensorSpec(shape=(tokens, 64), dtype="float32", fill="cos")
    return Workload(
        id=f"tune-{tokens}x24x128",
        op="apply_rotary_embedding",
        inputs={
            "x": TensorSpec(shape=(1, tokens, 24, 128), dtype="bfloat16"),
            "cos": table,
            "sin": table.model_copy(update={"fill": "sin"}),
        },
        scalars={"interleaved": False},
    )


SWEEPS = (
    Sweep(
        table=rotary.TUNED,
        candidates=tuple(grid()),
        lines=({"bytes": 2**25}, {}),
        rows=tuple(pairs(tokens) for tokens in (256, 4096)),
    ),
    Sweep(table=ltx2_rotary.TUNED, candidates=tuple(grid()), lines=({"bytes": 2**22}, {"bytes": 2**25}, {})),
)
