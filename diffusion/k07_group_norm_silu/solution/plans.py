"""From a call to its launches: which method takes it, and how it is cut into programs."""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton

from kda_runtime.checks import capability, given, pdl_works
from kda_runtime.launch import Chain, Launch, Step, is_interpreted
from kda_runtime.triton_rows import VECTOR_BYTES, vector_width
from kda_runtime.tuned_table import Table

from .kernels import Cut, Writing, flow_kernel, fresh_kernel, output_kernel, statistics_kernel, whole_kernel

# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. `warps` and `tiles` are what is aimed at: small groups get fewer, very large ones more."""

    method: str
    """`whole`: a program holds a group. `stretch`: statistics and output in launches of their own. `flow`: statistics
    of the first parts in a launch, all the rest side by side in another. `ring`: parts stay in shared memory until
    their group has statistics. `cluster`: a group in the registers of a cluster of blocks. These two are CuTe DSL."""
    warps: int = 8
    tiles: int = 4
    """stretch, flow, ring: 16-byte vectors of x that a thread has of a part."""
    ahead_mb: float = 4
    """flow: the statistics are a group and so many MB of x ahead of the output."""
    reverse: bool = True
    """stretch, flow: the second reading goes from the end to the beginning, in flow that of every group."""
    early: bool = True
    """stretch: read x, weight and bias before waiting for the previous launch."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    hints: bool = False
    """stretch, flow: evict-last on the first reading of x, evict-first on the second."""
    store: str = ""
    """Cache modifier of the stores."""
    resident: int = 24
    """flow, ring: warps that have room on a multiprocessor; more of them have fewer registers, and may spill."""
    stages: int = 3
    """ring: parts of a block in shared memory."""
    ahead: int = 2
    """ring: of these, parts whose statistics are published while the oldest waits for its group; the rest load."""
    blocks: int = 8
    """cluster: blocks of a cluster."""


TUNED = Table(__file__, "group_norm_silu", Config)
"""Tuned configurations, chosen by `group_bytes` (of x, in one group) and `bytes` (of x)."""
WHOLE_BYTES = 98304
"""Most bytes of a group in one program: 12 tiles of 16 warps, 48 registers a thread; 14 tiles spilled 24 bytes."""
EARLY_TILES = 8
"""whole: up to so many tiles, all of weight and bias is loaded before the statistics; with 12 that spilled 24 bytes."""
LATE_AHEAD = 4
"""whole: with more tiles, weight and bias are loaded so many ahead; with 1 or 2 each last tile waits for its own."""
CLUSTER_TILES = 16
"""cluster: most vectors of a thread; 18 spilled 136 bytes."""
CLUSTER_CHANNELS = 2048
"""cluster: most channels of a group, 16 KB of shared memory."""
FLOW, FLOW_BYTES = Config("flow", warps=8, tiles=6, hints=True, store=".cs"), 128_000_000
"""Configuration for tensors of shapes that `ring` does not take, and the bytes of x above which it is used: there it is
faster than `stretch` in the sweep of 2026-11-21."""
MAX_SLOTS = 1024
"""flow: words that a program of the first launch initialises, a power of two."""
MAX_TICKETS = 2**30
"""flow, ring: most parts of all groups, because they are counted in 32 bits."""
RING_CAPABILITIES = (9, 10)
"""ring: major compute capabilities whose multiprocessors have 228 KiB of shared memory."""
PATIENCE = 4096
"""ring: how often a thread looks for statistics, about 0.7 us each, before its block computes them itself."""
FRESH = 1024
"""ring: words that a program of the first launch initialises."""
MAX_PARTS = 4096
"""Most programs of a group: each of them reads the partial results of all, 8 to a thread at 16 warps."""
MAX_WARPS, MAX_TILES = 16, 8
MAX_SECOND = 65535
"""Most programs in the second dimension of a grid, and in the third."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
H200_MULTIPROCESSORS = 132
"""Number of multiprocessors that is assumed for tensors on no GPU."""


# --- how a call is cut


class Call(NamedTuple):
    """The arguments of one call."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    num_groups: int
    eps: float

    @property
    def groups(self) -> int:
        """Groups of all batches."""
        return self.x.shape[0] * self.num_groups

    @property
    def elements(self) -> int:
        """Elements of a group."""
        return self.x.numel() // self.groups

    @property
    def channel(self) -> int:
        """Elements of a channel."""
        return self.x.numel() // (self.x.shape[0] * self.x.shape[1])

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What every kernel gets: elements of a group and of a channel, groups and channels of a group."""
        return self.elements, self.channel, self.num_groups, self.x.shape[1] // self.num_groups

    @property
    def group_bytes(self) -> int:
        """Bytes of a group."""
        return self.elements * self.x.itemsize


class Parts(NamedTuple):
    """The programs of a group."""

    cut: Cut
    warps: int
    number: int


def cut(elements: int, channel: int, item: int, warps: int, tiles: int) -> Parts:
    """Cut a group of `elements`, `channel` to a channel and `item` bytes each, into parts of about `tiles` tiles.

    `tiles` 0 makes it one part, of as many tiles as it takes.
    """
    vector = VECTOR_BYTES // item
    while tiles and elements > MAX_PARTS * tiles * warps * 32 * vector and (warps < MAX_WARPS or tiles < MAX_TILES):
        warps, tiles = min(2 * warps, MAX_WARPS), min(2 * tiles, MAX_TILES)
    block = min(1 << (elements - 1).bit_length(), warps * 32 * vector)
    needed = -(-elements // block)
    tiles = min(tiles, needed) if tiles else needed
    parts = -(-needed // tiles)
    full = elements // block if parts == 1 else tiles * (elements % (block * tiles) == 0)
    return Parts(Cut(block, tiles, full, math.gcd(channel, vector)), min(warps, max(1, block // (32 * vector))), parts)


def rows_of_programs(count: int) -> tuple[int, int]:
    """The second and third dimension of a grid that has `count` programs in both, or a few more."""
    layers = -(-count // MAX_SECOND)
    return -(-count // layers), layers


def head(parts: int, total: int, part_bytes: int, ahead_mb: float) -> int:
    """flow: number of parts, of `total` groups of `parts`, whose statistics are computed before the first output."""
    ahead = math.ceil(ahead_mb * 1e6 / part_bytes)
    return min(max(parts + ahead, parts * total // MAX_SLOTS + 1), parts * total)


# --- plan


def plan(call: Call) -> Chain:
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    major = capability(call.x)
    config = TUNED.select(major, group_bytes=call.group_bytes, bytes=call.x.nbytes)
    config = replace(config, pdl=config.pdl and pdl_works(whole_kernel, major))
    if config.method == "whole" and call.group_bytes <= WHOLE_BYTES:
        return _whole(call, config)
    if config.method == "cluster":
        return (_cluster(call, config) if major >= 9 else None) or _otherwise(call, config)
    if config.method == "stretch":
        return _stretch(call, config)
    made = _ring(call, config) if config.method == "ring" and major in RING_CAPABILITIES else None
    if made is None and (config.method == "flow" or call.x.nbytes > FLOW_BYTES):
        made = _flow(call, config if config.method == "flow" else replace(FLOW, pdl=config.pdl))
    return made or _stretch(call, Config("stretch", pdl=config.pdl))


def _otherwise(call: Call, config: Config) -> Chain:
    """Takes any shape instead of a cluster: one program a group if it can hold the group, else two launches."""
    if call.group_bytes <= WHOLE_BYTES:
        return _whole(call, Config("whole", warps=8 if call.group_bytes <= WHOLE_BYTES // 2 else 16, pdl=config.pdl))
    return _stretch(call, Config("stretch", pdl=config.pdl))


def _whole(call: Call, config: Config) -> Chain:
    """One program a group."""
    made = _parts(call, replace(config, tiles=0))
    ahead = made.cut.tiles if made.cut.tiles <= EARLY_TILES else LATE_AHEAD
    how = _writing(call, config, made)
    launch = Launch.make(whole_kernel, (call.groups,), call.x, *call[:3], *call.sizes, AHEAD=ahead, **how)
    return launch.chain(len(given(call)), outputs=[0])  # like x


def _cluster(call: Call, config: Config) -> Chain | None:
    """One cluster a group, None where it does not take the call: another method does then."""
    elements, _, _, group_channels = call.sizes
    tiles = -(-elements // (config.blocks * vector_width(config.warps, call.x.itemsize)))
    if tiles > CLUSTER_TILES or group_channels > CLUSTER_CHANNELS or not _takes_vectors(call):
        return None
    from .cluster import ClusterLaunch  # the DSL takes a second to import

    launch = ClusterLaunch(**_cute(call, replace(config, tiles=tiles), _otherwise(call, config)))
    return Chain((launch,), ((0, 1, 2, 3),), outputs=(0,))  # like x


def _stretch(call: Call, config: Config) -> Chain:
    """Statistics of all parts, then their output."""
    made = _parts(call, config)
    grid = made.number, *rows_of_programs(call.groups)
    partials = torch.empty(call.groups * made.number, dtype=torch.int64, device="meta")
    output = _output(call, config, made, output_kernel, grid, partials, EARLY=config.early)
    return _behind(_statistics(call, config, made, partials, partials.numel()), output, partials)


def _flow(call: Call, config: Config) -> Chain | None:
    """Statistics of the first parts, then all the rest at once; None where parts are too many to be counted."""
    made = _parts(call, config)
    every = made.number * call.groups
    if every > MAX_TICKETS:
        return None
    partials = torch.empty(every + 1, dtype=torch.int64, device="meta")
    part_bytes = made.cut.block * made.cut.tiles * call.x.itemsize
    begun = head(made.number, call.groups, part_bytes, config.ahead_mb)
    # As many programs as run on the GPU at once, and a register limit so that they fit; others would find no work.
    grid = (min(every, multiprocessors(call.x) * (config.resident // made.warps)),)
    room = {"THREADS": 32 * made.warps, "maxnreg": REGISTERS // (32 * config.resident) // 8 * 8}
    output = _output(call, config, made, flow_kernel, grid, partials, begun, **room)
    return _behind(_statistics(call, config, made, partials, begun), output, partials)


def _ring(call: Call, config: Config) -> Chain | None:
    """Two launches, the first without work on x; None where the second one does not take the call."""
    part = config.tiles * vector_width(config.warps, call.x.itemsize)
    parts = -(-call.elements // part)
    every = parts * call.groups
    blocks = min(every, multiprocessors(call.x) * (config.resident // config.warps))
    # A block must publish its last part of a group before it writes its first, or all would wait for each other.
    fits = call.channel >= part and parts <= config.ahead * blocks + 1 and every <= MAX_TICKETS
    if not fits or not _takes_vectors(call):
        return None
    from .ring import RingLaunch  # the DSL takes a second to import

    words = torch.empty(every, dtype=torch.int64, device="meta")
    block = min(FRESH, triton.next_power_of_2(every))
    options = {"PDL": config.pdl, "num_warps": 4, "launch_pdl": config.pdl}
    fresh = Launch.make(fresh_kernel, (-(-every // block),), words, every, BLOCK=block, **options)
    otherwise = _stretch(call, Config("stretch", pdl=config.pdl))
    launch = RingLaunch(**_cute(call, config, otherwise), blocks=blocks, patience=PATIENCE)
    return _behind(fresh, launch, words, reads_x=False)


def _takes_vectors(call: Call) -> bool:
    """Whether the CuTe DSL kernels can run: no vector spans channels, x is not on a CPU, the DSL is installed."""
    return call.channel * call.x.itemsize % VECTOR_BYTES == 0 and not call.x.is_cpu and find_spec("cutlass") is not None


def _cute(call: Call, config: Config, otherwise: Chain) -> dict[str, Any]:
    """The arguments that both CuTe DSL launches have; `otherwise` takes an x that is not aligned."""
    elements, channel, *groups = call.sizes
    vector = VECTOR_BYTES // call.x.itemsize
    return {
        "dtypes": (call.x.dtype, call.weight.dtype, call.bias.dtype),
        "sizes": (elements // vector, channel // vector, call.groups, *groups),
        "eps": float(call.eps),
        "config": config,
        "otherwise": otherwise,
    }


def _parts(call: Call, config: Config) -> Parts:
    return cut(call.elements, call.channel, call.x.itemsize, config.warps, config.tiles)


def _behind(first: Launch, second: Step, partials: torch.Tensor, reads_x: bool = True) -> Chain:
    """Both launches. Each call has its own `partials`, so that calls on several streams or in graphs never share it."""
    y, between, x, weight, bias = range(5)  # places in the chain's table
    places = (between, x)[: 1 + reads_x], (y, x, weight, bias, between)
    return Chain((first, second), places, outputs=(0,), scratch=(partials,))  # like x


def _statistics(call: Call, config: Config, made: Parts, partials: torch.Tensor, begun: int) -> Launch:
    """The launch that computes the statistics of the first `begun` parts."""
    grid = made.number, *rows_of_programs(-(-begun // made.number))
    numbers = call.elements, call.groups, made.number, begun
    others = partials.numel() - begun  # entries that it initialises for the next launch
    slots = triton.next_power_of_2(-(-partials.numel() // begun)) if others else 0
    how = _every(config, made)
    return Launch.make(statistics_kernel, grid, partials, call.x, *numbers, HINTS=config.hints, SLOTS=slots, **how)


def _output(
    call: Call, config: Config, made: Parts, kernel: Any, grid: Any, partials: torch.Tensor, *begun: int, **more: Any
) -> Launch:
    """The launch that writes y."""
    tensors = call.x, *call[:3], partials  # y is like x
    numbers = *call.sizes, call.groups, made.number, *begun
    two, parts = call.channel >= made.cut.block * made.cut.tiles, triton.next_power_of_2(made.number)
    how = {"TWO": two, "PARTS": parts, "REVERSE": config.reverse, "HINTS": config.hints} | more
    return Launch.make(kernel, grid, *tensors, *numbers, **how, **_writing(call, config, made))


def _every(config: Config, made: Parts) -> dict[str, Any]:
    """Constants of all kernels that read x, and compiler options."""
    return {"CUT": made.cut, "PDL": config.pdl, "num_warps": made.warps, "launch_pdl": config.pdl}


def _writing(call: Call, config: Config, made: Parts) -> dict[str, Any]:
    """The same for kernels that write y."""
    # Approximations are for 16-bit outputs, which have few enough digits; the interpreter does not have them. A single
    # element is its own mean, and x * scale - mean * scale with a scale of 1 / sqrt(eps) would not be 0.
    fast = call.x.itemsize == 2 and call.elements > 1 and not is_interpreted(whole_kernel)
    return {"HOW": Writing(float(call.eps), config.store, fast)} | _every(config, made)


def multiprocessors(x: torch.Tensor) -> int:
    """Number of multiprocessors of x's device."""
    if not x.is_cuda:
        return H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
