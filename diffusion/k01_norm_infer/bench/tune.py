"""Which configurations may be chosen: `kda tune norm_infer` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload
from kda_tools.lab.tune import Sweep

from ..solution.norm import TUNED, Config


def grid() -> Iterator[Config]:
    """Warps and vectors; late affine loads, hints and launches without PDL only with settings that they may help."""
    for warps, vectors in product((8, 4, 16), (1, 2, 5, 10)):
        for early, store in product((True, False), ("", ".cs")):
            yield Config(warps, vectors, early, store=store)
        # A hint for loads can help rows that stream, so it is tried together with the hint for stores.
        yield Config(warps, vectors, load=".cg", store=".cs")
        yield Config(warps, vectors, load="evict_first")
        if vectors in (1, 5):
            yield Config(warps, vectors, pdl=False)
            yield Config(warps, vectors, pdl=False, store=".cs")


def layer_norm(rows: int, width: int, dtype: DType) -> Workload:
    """A LayerNorm with weight and bias."""
    affine = TensorSpec(shape=(width,), dtype=dtype)
    return Workload(
        id=f"tune-{rows}x{width}-{dtype}",
        op="norm_infer",
        inputs={"x": TensorSpec(shape=(rows, width), dtype=dtype), "weight": affine, "bias": affine},
        scalars={"eps": 1e-6, "is_rms_norm": False},
    )


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        lines=({"width": 512}, {"width": 8192, "bytes": 2**24}, {"width": 8192}, {}),
        rows=(
            layer_norm(257, 3072, "bfloat16"),
            layer_norm(512, 5120, "float32"),
            layer_norm(4096, 16384, "bfloat16"),
            layer_norm(2048, 16384, "float32"),
        ),
    ),
)
