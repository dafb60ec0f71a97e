"""Which configurations may be chosen: `kda tune moe_routing` times them all."""

from itertools import product

from kda_tools.lab.tune import Sweep

from ..solution import moe_align, topk, topk_sum

SWEEPS = (
    Sweep(
        table=topk.TUNED,
        candidates=tuple(topk.Config(warps, lanes) for warps, lanes in product((1, 2, 4), (2, 4, 8, 16))),
        lines=({"tokens": 256}, {"tokens": 2048}, {}),
        in_graphs=True,
    ),
    Sweep(
        table=moe_align.TUNED,
        candidates=tuple(
            moe_align.Config(warps, blocks, clusters)
            for warps, blocks, clusters in product((8, 16, 32), (1, 8, 16), (1, 2, 4, 8))
            if blocks <= warps
        ),
        lines=({"pairs": 256}, {"pairs": 1024}, {"pairs": 16384}, {}),
        in_graphs=True,
    ),
    Sweep(
        table=topk_sum.TUNED,
        candidates=tuple(
            topk_sum.Config(warps, rows, load, store)
            for warps, rows, (load, store) in product(
                (1, 2, 4, 8), (1, 2), (("", ""), ("", ".cs"), ("evict_first", ""), ("evict_first", ".cs"))
            )
        ),
        lines=(
            {"bytes": 1_048_576},
            {"bytes": 2_097_152},
            {"bytes": 4_194_304},
            {"bytes": 16_777_216},
            {"bytes": 67_108_864},
            {"bytes": 167_772_160},
            {},
        ),
        in_graphs=True,
    ),
)
