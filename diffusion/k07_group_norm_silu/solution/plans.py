"""From a call to its launches: which method takes it, and how it is cut."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from kda_core.calls import capability, given, pdl_works
from kda_core.launch import Chain, Launch, Step, is_interpreted

from .kernels import flow_kernel, fresh_kernel, output_kernel, statistics_kernel, whole_kernel
from .tuning import (
    CLUSTER_CHANNELS,
    CLUSTER_TILES,
    EARLY_TILES,
    FRESH,
    LATE_AHEAD,
    MAX_TICKETS,
    PATIENCE,
    REGISTERS,
    TUNED,
    VECTOR_BYTES,
    WHOLE_BYTES,
    Config,
    Cut,
    cut,
    head,
    rows_of_programs,
)

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

H200_MULTIPROCESSORS = 132
"""For tensors that are on no GPU."""
RING_CAPABILITIES = (9, 10)
"""Those whose multiprocessors have 228 KiB of shared memory."""
FLOW, FLOW_BYTES = Config("flow", warps=8, tiles=6, hints=True, store=".cs"), 128_000_000
"""Instead of a ring, for larger tensors of shapes that it does not take: the sweep of 2026-11-21 has it ahead of
`stretch` there."""


class Call(NamedTuple):
    """The arguments of one call."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    num_groups: int
    eps: float
    tensors = property(given)

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


def plan(call: Call) -> Chain:
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    x = call.x
    major = capability(x)
    size = call.elements * x.itemsize
    config = TUNED.select(major, group_bytes=size, bytes=call.groups * size)
    pdl = config.pdl and pdl_works(whole_kernel, major)
    if config.method == "whole" and size <= WHOLE_BYTES:
        return _whole(call, config, pdl)
    if config.method == "cluster":
        return (_cluster(call, config, pdl) if major >= 9 else None) or _otherwise(call, pdl)
    if config.method == "stretch":
        return stretch(call, config, pdl)
    made = _ring(call, config, pdl) if config.method == "ring" and major in RING_CAPABILITIES else None
    if made is None and (config.method == "flow" or call.groups * size > FLOW_BYTES):
        made = _flow(call, config if config.method == "flow" else FLOW, pdl)
    return made or stretch(call, Config("stretch"), pdl)


def _otherwise(call: Call, pdl: bool) -> Chain:
    """Instead of a cluster, and for every shape: a program for groups that it can hold, else two launches."""
    size = call.elements * call.x.itemsize
    if size <= WHOLE_BYTES:
        return _whole(call, Config("whole", warps=8 if size <= WHOLE_BYTES // 2 else 16), pdl)
    return stretch(call, Config("stretch"), pdl)


def _sizes(call: Call) -> tuple[int, int, int, int]:
    """What every kernel is told of the shape: elements of a group and of a channel, groups and channels of a group."""
    return call.elements, call.channel, call.num_groups, call.x.shape[1] // call.num_groups


def _whole(call: Call, config: Config, pdl: bool) -> Chain:
    made = cut(call.elements, call.channel, call.x.itemsize, config.warps, tiles=0)
    launch = Launch.make(
        whole_kernel,
        (call.groups,),
        call.x,
        *call[:3],
        *_sizes(call),
        EPS=float(call.eps),
        BLOCK=made.block,
        TILES=made.tiles,
        FULL=made.full,
        V=made.shared,
        AHEAD=made.tiles if made.tiles <= EARLY_TILES else LATE_AHEAD,
        PDL=pdl,
        STORE=config.store,
        FAST=_fast(call),
        num_warps=made.warps,
        launch_pdl=pdl,
    )
    return launch.chain(len(call.tensors), outputs=[0])  # like x


def _cluster(call: Call, config: Config, pdl: bool) -> Chain | None:
    """One cluster a group, None where it does not take the call: another method does then."""
    x, vector = call.x, VECTOR_BYTES // call.x.itemsize
    elements, channel, _, group_channels = _sizes(call)
    tiles = -(-elements // (config.blocks * config.warps * 32 * vector))
    fits = tiles <= CLUSTER_TILES and group_channels <= CLUSTER_CHANNELS and channel % vector == 0
    if not fits or x.is_cpu or find_spec("cutlass") is None:
        return None
    from .cluster import ClusterLaunch  # the DSL takes a second to import

    otherwise = _otherwise(call, pdl)
    launch = ClusterLaunch(**_cute(call, config, pdl), blocks=config.blocks, tiles=tiles, otherwise=otherwise)
    return Chain((launch,), ((0, 1, 2, 3),), outputs=(0,))  # like x


def stretch(call: Call, config: Config, pdl: bool) -> Chain:
    """Statistics of all parts, then their output."""
    made = _parts(call, config)
    grid = made.parts, *rows_of_programs(call.groups)
    partials = torch.empty(call.groups * made.parts, dtype=torch.int64, device="meta")
    hints = {"REVERSE": config.reverse, "HINTS": config.hints}
    output = _output(call, config, made, pdl, output_kernel, grid, partials, EARLY=config.early, **hints)
    return _behind(_statistics(call, config, made, pdl, partials, partials.numel()), output, partials)


def _flow(call: Call, config: Config, pdl: bool) -> Chain | None:
    """Statistics of the first parts, then all the rest at once; None where parts are too many to be counted."""
    made = _parts(call, config)
    every = made.parts * call.groups
    if every > MAX_TICKETS:
        return None
    partials = torch.empty(every + 1, dtype=torch.int64, device="meta")
    begun = head(made.parts, call.groups, made.block * made.tiles * call.x.itemsize, config.ahead_mb)
    # Programs beyond those that have room would find no work.
    programs, room = _resident(call, config, made)
    hints = {"REVERSE": config.reverse, "HINTS": config.hints}
    output = _output(call, config, made, pdl, flow_kernel, (min(every, programs),), partials, begun, **room, **hints)
    return _behind(_statistics(call, config, made, pdl, partials, begun), output, partials)


def _ring(call: Call, config: Config, pdl: bool) -> Chain | None:
    """Two launches, the first without work on x; None where the second one does not take the call."""
    x, vector = call.x, VECTOR_BYTES // call.x.itemsize
    elements, channel, _, _ = _sizes(call)
    part = 32 * config.warps * config.tiles * vector
    parts = -(-elements // part)
    every = parts * call.groups
    blocks = min(every, multiprocessors(x) * (config.resident // config.warps))
    # A block says its last part of a group before it writes the first one: else all would wait for each other.
    fits = channel % vector == 0 and channel >= part and parts <= config.ahead * blocks + 1
    if not fits or every > MAX_TICKETS or x.is_cpu or find_spec("cutlass") is None:
        return None
    from .ring import RingLaunch  # the DSL takes a second to import

    words = torch.empty(every, dtype=torch.int64, device="meta")
    launch = RingLaunch(
        **_cute(call, config, pdl),
        tiles=config.tiles,
        otherwise=stretch(call, Config("stretch"), pdl),
        blocks=blocks,
        stages=config.stages,
        ahead=config.ahead,
        resident=config.resident,
        store=config.store,
        patience=PATIENCE,
    )
    return _behind(_fresh(words, pdl), launch, words, reads_x=False)


def _cute(call: Call, config: Config, pdl: bool) -> dict[str, Any]:
    """What both CuTe DSL kernels are told alike; each has another chain behind it, for an x that is not aligned."""
    elements, channel, groups, group_channels = _sizes(call)
    return {
        "dtypes": (call.x.dtype, call.weight.dtype, call.bias.dtype),
        "sizes": (elements, channel, call.groups, groups, group_channels),
        "eps": float(call.eps),
        "warps": config.warps,
        "pdl": pdl,
    }


def _fresh(words: torch.Tensor, pdl: bool) -> Launch:
    """The launch that says of no part that it has statistics."""
    count = words.numel()
    options = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    block = min(FRESH, triton.next_power_of_2(count))
    return Launch.make(fresh_kernel, (-(-count // block),), words, count, BLOCK=block, **options)


def _resident(call: Call, config: Config, made: Cut) -> tuple[int, dict[str, Any]]:
    """Programs that are on the GPU at once, and what makes sure that they have room; others would find no work."""
    room = {"THREADS": 32 * made.warps, "maxnreg": REGISTERS // (32 * config.resident) // 8 * 8}
    return multiprocessors(call.x) * (config.resident // made.warps), room


def _behind(first: Launch, second: Step, partials: torch.Tensor, reads_x: bool = True) -> Chain:
    """Both launches, and between them memory of the call's own: calls on several streams and in graphs never meet."""
    y, between, x, weight, bias = range(5)  # places in the chain's table
    places = (between, x)[: 1 + reads_x], (y, x, weight, bias, between)
    return Chain((first, second), places, outputs=(0,), scratch=(partials,))  # like x


def _parts(call: Call, config: Config) -> Cut:
    return cut(call.elements, call.channel, call.x.itemsize, config.warps, config.tiles)


def _statistics(call: Call, config: Config, made: Cut, pdl: bool, partials: torch.Tensor, begun: int) -> Launch:
    """The launch that takes those of the first `begun` parts."""
    others = partials.numel() - begun  # which it makes ready for the next launch
    return Launch.make(
        statistics_kernel,
        (made.parts, *rows_of_programs(-(-begun // made.parts))),
        partials,
        call.x,
        call.elements,
        call.groups,
        made.parts,
        begun,
        BLOCK=made.block,
        TILES=made.tiles,
        FULL=made.full,
        V=made.shared,
        PDL=pdl,
        HINTS=config.hints,
        SLOTS=triton.next_power_of_2(-(-partials.numel() // begun)) if others else 0,
        num_warps=made.warps,
        launch_pdl=pdl,
    )


def _output(
    call: Call,
    config: Config,
    made: Cut,
    pdl: bool,
    kernel: "JITFunction[Any]",
    grid: tuple[int, ...],
    partials: torch.Tensor,
    *numbers: int,
    **more: object,
) -> Launch:
    """The launch that writes y."""
    return Launch.make(
        kernel,
        grid,
        call.x,
        *call[:3],
        partials,
        *_sizes(call),
        call.groups,
        made.parts,
        *numbers,
        EPS=float(call.eps),
        BLOCK=made.block,
        TILES=made.tiles,
        FULL=made.full,
        V=made.shared,
        TWO=call.channel >= made.block * made.tiles,
        PARTS=triton.next_power_of_2(made.parts),
        PDL=pdl,
        STORE=config.store,
        FAST=_fast(call),
        num_warps=made.warps,
        launch_pdl=pdl,
        **more,
    )


def _fast(call: Call) -> bool:
    """Whether the digits of the output leave room for approximations, which the interpreter does not have.

    One element is its own mean, and x * scale - mean * scale with a scale of 1 / sqrt(eps) would not be 0.
    """
    return call.x.itemsize == 2 and call.elements > 1 and not is_interpreted(whole_kernel)


def multiprocessors(x: torch.Tensor) -> int:
    """Of x's device."""
    if not x.is_cuda:
        return H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
