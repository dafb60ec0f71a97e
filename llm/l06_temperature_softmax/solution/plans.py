"""From a call to its launches: which kernels take it, and how a row is cut."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
import triton

from kda_runtime.checks import capability, given, pdl_works
from kda_runtime.launch import Chain, Launch
from kda_runtime.tuned_table import Table

from .kernels import parts_kernel, probabilities_kernel

# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    method: str
    """`cluster`: a row in the registers of a cluster of blocks, one launch, CuTe DSL. `split`: two launches, Triton."""
    warps: int
    """Warps of a block, or of a program."""
    blocks: int = 16
    """cluster: blocks of a cluster, a power of two from 2 on; rows of few vectors get fewer."""
    elements: int = 8192
    """split: elements of a program."""
    store: str = ""
    """Cache modifier of the stores."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "temperature_softmax", Config)
"""Tuned configurations, chosen by `bytes` (of logits and probabilities)."""
VECTOR = 4
"""cluster: elements of a vector, 16 bytes of probabilities."""
LINE = 8
"""cluster: a block's share begins at a multiple of so many vectors, which is a line of the cache."""
TILES = 20
"""cluster: vectors of a thread; with more there is no room for two blocks on a multiprocessor."""
PARTS = 4096
"""split: most parts of a row, which every program of its second launch combines."""
MOST_BYTES = 2**31
"""cluster: bytes from one row of logits to the next are fewer, since the kernel counts them in 32 bits."""


# --- how a call is cut


class Call(NamedTuple):
    """The arguments of one call."""

    logits: torch.Tensor
    temperatures: torch.Tensor | None

    @property
    def temperature_stride(self) -> int:
        """Elements from one row's temperature to that of the next."""
        t = self.temperatures
        return 0 if t is None or t.numel() == 1 else t.stride(0)


def probabilities_of(call: Call) -> torch.Tensor:
    """Shape and dtype of the result, without memory."""
    return call.logits.new_empty(call.logits.shape, dtype=torch.float32, device="meta")


def plan(call: Call) -> Chain:
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    rows, n = call.logits.shape
    major = capability(call.logits)
    config = TUNED.select(major, bytes=rows * n * (call.logits.itemsize + 4))
    config = replace(config, pdl=config.pdl and pdl_works(parts_kernel, major))
    split = _split(call, config if config.method == "split" else Config("split", warps=8, pdl=config.pdl))
    return (_cluster(call, config, split) if config.method == "cluster" and major >= 9 else None) or split


def _split(call: Call, config: Config) -> Chain:
    """Two launches, with scratch memory for what the first passes to the second."""
    rows, n = call.logits.shape
    block = min(triton.next_power_of_2(n), max(config.elements, triton.next_power_of_2(-(-n // PARTS))))
    parts = -(-n // block)
    partials = torch.empty(2, rows * parts, dtype=torch.float32, device="meta")
    tensors = (call.logits, call.temperatures, rows)
    cut = {"N": n, "ROW_STRIDE": call.logits.stride(0), "T_STRIDE": call.temperature_stride, "PARTS": parts}
    how = {"BLOCK": block, "PDL": config.pdl, "num_warps": config.warps, "launch_pdl": config.pdl}
    first = Launch.make(parts_kernel, (rows * parts,), partials, *tensors, **cut, **how)
    slots = {"SLOTS": triton.next_power_of_2(parts), "STORE": config.store}
    p = probabilities_of(call)
    second = Launch.make(probabilities_kernel, (rows * parts,), p, partials, *tensors, **cut, **slots, **how)
    inputs = tuple(range(2, 2 + len(given(call))))  # after the output and the scratch in the chain's table
    return Chain((first, second), ((1, *inputs), (0, 1, *inputs)), outputs=(p,), scratch=(partials,))


def _cluster(call: Call, config: Config, otherwise: Chain) -> Chain | None:
    """One launch, a cluster for each row; None if the kernel does not take the call."""
    logits = call.logits
    rows, n = logits.shape
    apart = logits.stride(0) if rows > 1 else n
    vectors, rest = divmod(n, VECTOR)
    if rest or apart % VECTOR or apart * logits.itemsize >= MOST_BYTES or logits.is_cpu or find_spec("cutlass") is None:
        return None
    threads, blocks = config.warps * 32, config.blocks
    # One block is launched without a cluster. On an H200 that ended with an illegal instruction.
    while blocks > 2 and vectors <= blocks // 2 * threads:
        blocks //= 2
    share = -(-vectors // blocks)
    share += -share % LINE
    tiles = -(-share // threads)
    if tiles > TILES:
        return None
    from .cluster import ClusterLaunch  # the DSL takes a second to import

    launch = ClusterLaunch(
        dtypes=(logits.dtype, None if call.temperatures is None else call.temperatures.dtype),
        config=replace(config, blocks=blocks),
        tiles=tiles,
        rows=rows,
        numbers=(vectors, share, apart * logits.itemsize, call.temperature_stride),
        otherwise=otherwise,
    )
    return Chain((launch,), (tuple(range(1 + len(given(call)))),), outputs=(probabilities_of(call),))
