"""Which configurations may be chosen: `kda tune norm_tanh_mul_add` times them all."""

from collections.abc import Iterator
from itertools import product

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_tools.lab.tune import Sweep

from ..solution.norm_tanh_mul_add import TUNED, Config
from .grid import DOUBLE, OPS

COLUMNS = 3840
CUTS = ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4))
"""Warps and rows. Fewer warps do not hold these rows of 3840 columns without spills, and would be raised to these."""

LIMITS = ((1, 96), (0, 96), (2, 128))
"""(early, maxnreg): norms whose operands are loaded early, and a register limit that makes room for 5 programs of 4
warps, or holds both norms. Other cuts spill under a limit below the number that the compiler takes: 8 warps spill 8
bytes at 48 registers, and with two rows 80 bytes at 64."""


def grid() -> Iterator[Config]:
    """Every cut with every order of loads; settings that depend on neither (PDL, the tanh, L1) with the usual order.

    Register limits come last.
    """
    for warps, rows in CUTS:
        for early, store in product((1, 0, 2), ("", ".cs")):
            yield Config(warps, rows, early=early, store=store)
        for store in ("", ".cs"):
            yield Config(warps, rows, pdl=False, store=store)
            yield Config(warps, rows, load=".cg", store=store)
        yield Config(warps, rows, approximate=False)
    for early, maxnreg in LIMITS:
        for store in ("", ".cs"):
            yield Config(4, early=early, maxnreg=maxnreg, store=store)


def small(op: str, tokens: int) -> Workload:
    """A row like the frozen ones, with fewer tokens: it fits into the L2 cache."""
    whole = TensorSpec(shape=(1, tokens, COLUMNS), dtype="bfloat16")
    vector = TensorSpec(shape=(COLUMNS,), dtype="bfloat16")
    line = TensorSpec(shape=(1, 1, COLUMNS), dtype="bfloat16")
    inputs = {"x": whole, "weight": vector, "scale": line, "shift": whole}
    if op == DOUBLE:
        inputs |= {"weight2": vector, "scale2": line}
    return Workload(
        id=f"tune-{'dual' if op == DOUBLE else 'single'}-{tokens}",
        op=op,
        inputs=inputs,
        scalars={"norm_type": "rms", "eps": 1e-05},
    )


SWEEPS = (
    Sweep(
        table=TUNED,
        candidates=tuple(grid()),
        lines=({"outputs": 1, "bytes": 2**24}, {"outputs": 1}, {"bytes": 2**24}, {}),
        rows=tuple(small(op, tokens) for op in OPS for tokens in (256, 1024)),
    ),
)
