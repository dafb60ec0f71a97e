"""Which configurations may be chosen: `kda tune fused_add_rmsnorm` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_runtime.triton_rows import vector_width
from kda_runtime.tuned_table import Features
from kda_tools.lab.tune import Sweep

from ..solution.rmsnorm import MAX_WARPS, TUNED, Config, warps_of_a_row

WIDTHS = (512, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
"""Widths of models: each changes how many warps a row takes and how many threads idle."""
ROWS = (16, 128, 1024)
LONG = {width: ({"width": width, "rows": 4096}, {"width": width}) for width in (2048, 3072, 4096)}
"""Lines of widths at which 4096 rows fit the L2 in part, and more rows do not."""
WARP = vector_width(1, 2)
"""Columns of bfloat16 that a warp holds in one vector per thread."""


def grid() -> Iterator[Config]:
    """Vectors per thread, rows in the same or in other warps; also cache hints, late weights, and no PDL."""
    for vectors in (1, 2, 3, 4, 8):
        yield Config(vectors)
        yield Config(vectors, early=False)
        yield Config(vectors, pdl=False)
        yield Config(vectors, store=".cs")
        yield Config(vectors, load="evict_first")
        yield Config(vectors, load="evict_first", store=".cs")
        yield Config(vectors, early=False, load="evict_first")
        for beside in (2, 4):
            yield Config(vectors, beside=beside)
        if vectors <= 4:
            yield Config(vectors, rows=2)
            yield Config(vectors, rows=2, store=".cs")
            yield Config(vectors, rows=2, load="evict_first")


def fused(rows: int, width: int) -> Workload:
    """A call of fused_add_rmsnorm, for lines of the table that no frozen row falls into."""
    x = TensorSpec(shape=(rows, width), dtype="bfloat16")
    return Workload(
        id=f"tune-{rows}x{width}",
        op="fused_add_rmsnorm",
        inplace=("input", "residual"),
        inputs={"input": x, "residual": x, "weight": TensorSpec(shape=(width,), dtype="bfloat16")},
        scalars={"eps": 1e-6},
    )


def applies(config: Config, features: Features) -> bool:
    """Whether a program would have no more warps than a block may have, and no more rows than the call."""
    spread = warps_of_a_row(int(features["width"]), WARP, config.vectors)
    return spread * config.beside <= MAX_WARPS and config.rows * config.beside <= features["rows"]


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        lines=(
            *({"width": width, "rows": rows} for width, rows in product(WIDTHS, ROWS)),
            *(line for width in WIDTHS for line in LONG.get(width, ({"width": width},))),
            {},
        ),
        rows=(fused(16, 512), *(fused(1024, width) for width in (512, 5120, 8192, 16384))),
        applies=applies,
        in_graphs=True,
    ),
)
