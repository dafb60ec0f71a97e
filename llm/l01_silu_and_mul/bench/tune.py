"""Which configurations may be chosen: `kda tune silu_and_mul` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_judge.contract.tensor_spec import OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload
from kda_tools.lab.tune import Sweep

from ..solution.silu_and_mul import TUNED, Config

MIB = 2**20
BYTES = (MIB // 4, 2 * MIB, 8 * MIB, 32 * MIB, 64 * MIB)


def grid() -> Iterator[Config]:
    """Warps and vectors; also with cache hints, and without PDL."""
    for warps, vectors in product((4, 1, 2, 8, 16), (1, 2, 4)):
        yield Config(warps, vectors)
        yield Config(warps, vectors, store=".cs")
        if vectors < 4:
            # No input is read twice: loads that bypass the L1, together with the hint for stores.
            yield Config(warps, vectors, load=".cg", store=".cs")
            yield Config(warps, vectors, pdl=False)
            # Input is not read again: it should not push out what the next kernel reads.
            yield Config(warps, vectors, load="evict_first")


def call(rows: int, width: int) -> Workload:
    """A call for lines of the table that no frozen row falls into."""
    return Workload(
        id=f"tune-{rows}x{width}",
        op="silu_and_mul",
        inputs={"input": TensorSpec(shape=(rows, 2 * width), dtype="bfloat16")},
        outputs={"y": OutputSpec(shape=(rows, width), dtype="bfloat16")},
    )


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        lines=(
            *({"width": 1024, "bytes": bytes_} for bytes_ in BYTES),
            {"width": 1024},
            *({"bytes": bytes_} for bytes_ in BYTES),
            {},
        ),
        rows=(call(40, 12288), call(120, 12288), call(640, 12288), call(2560, 768)),
        in_graphs=True,
    ),
)
