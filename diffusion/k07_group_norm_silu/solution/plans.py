"""From a call to its launches: which method takes it, how it is cut, and how the launches become one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton

from kda_core.calls import capability, given, pdl_works
from kda_core.launch import MISS, Entry, Launch, guard
from kda_core.native import allocation

from .kernels import stretch_kernel, whole_kernel
from .tuning import CLUSTER_VECTORS, EARLY_TILES, LATE_AHEAD, TUNED, VECTOR_BYTES, WHOLE_BYTES, Config, cut, wave_groups


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


@dataclass(frozen=True)
class Plan:
    """The launches of a call, in order."""

    launches: tuple[Any, ...]
    """`Launch`es of the Triton kernels, or one `ClusterLaunch`."""
    partials: int
    """float32 numbers that the first launch leaves for the second, and so on; 0 where there is one launch."""


def plan(call: Call) -> Plan:
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    x = call.x
    major = capability(x)
    size = call.elements * x.itemsize
    config = TUNED.select(major, group_bytes=size, bytes=call.groups * size)
    pdl = config.pdl and pdl_works(whole_kernel, major)
    if config.method == "whole" and size <= WHOLE_BYTES:
        return _whole(call, config, pdl)
    made = _cluster(call, config, pdl) if config.method == "cluster" and major >= 9 else None
    return made or _stretch(call, config, pdl)


def _sizes(call: Call) -> tuple[int, int, int, int]:
    """What every kernel is told of the shape: elements of a group and of a channel, groups and channels of a group."""
    return call.elements, call.channel, call.num_groups, call.x.shape[1] // call.num_groups


def _whole(call: Call, config: Config, pdl: bool) -> Plan:
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
        num_warps=made.warps,
        launch_pdl=pdl,
    )
    return Plan((launch,), partials=0)


def _cluster(call: Call, config: Config, pdl: bool) -> Plan | None:
    """One cluster a group, None where it does not take the call: another method does then."""
    x, vector = call.x, VECTOR_BYTES // call.x.itemsize
    tiles = -(-call.elements // (config.blocks * config.warps * 32 * vector))
    whole_vectors = call.channel % vector == 0 and (x.is_meta or x.data_ptr() % VECTOR_BYTES == 0)
    if tiles * config.warps > CLUSTER_VECTORS or not whole_vectors or find_spec("cutlass") is None or x.is_cpu:
        return None
    # tvm-ffi looks at the strides of dimensions of size 1 too, which PyTorch leaves to chance.
    if any(tensor.stride() != torch.empty(tensor.shape, device="meta").stride() for tensor in call[:3]):
        return None
    from .cluster import ClusterLaunch  # the DSL takes a second to import

    elements, channel, *groups = _sizes(call)
    launch = ClusterLaunch(
        dtypes=(x.dtype, call.weight.dtype, call.bias.dtype),
        dims=x.dim(),
        sizes=(elements, channel, call.groups, *groups),
        eps=float(call.eps),
        blocks=config.blocks,
        warps=config.warps,
        tiles=tiles,
        pdl=pdl,
    )
    return Plan((launch,), partials=0)


def _stretch(call: Call, config: Config, pdl: bool) -> Plan:
    x, total = call.x, call.groups
    made = cut(call.elements, call.channel, x.itemsize, config.warps, config.tiles)
    wave = wave_groups(total, call.elements * x.itemsize, config.wave_mb)
    waves = -(-total // wave)
    partials = torch.empty(0, device="meta")

    def launch(number: int) -> Launch:
        """Takes the statistics of wave `number` and writes the output of the wave before it, where there are any."""
        statistics, normalise = number < waves, number > 0
        # A part's programs are two where it does both; the last launch has only the groups of the last wave.
        groups = total - (waves - 1) * wave if number == waves else wave
        return Launch.make(
            stretch_kernel,
            (made.parts * (statistics + normalise), groups),
            x if normalise else None,
            x,
            call.weight if normalise else None,
            call.bias if normalise else None,
            partials,
            *_sizes(call),
            total,
            wave,
            made.parts,
            number * wave,
            EPS=float(call.eps),
            BLOCK=made.block,
            TILES=made.tiles,
            FULL=made.full,
            V=made.shared,
            # Beside statistics it took 86 registers for 80, and a third block had no room.
            TWO=normalise and not statistics and call.channel >= made.block * made.tiles,
            PARTS=triton.next_power_of_2(made.parts) if normalise else 0,
            STATISTICS=statistics,
            NORMALISE=normalise,
            REVERSE=config.reverse,
            EARLY=config.early and normalise,
            PDL=pdl,
            HINTS=config.hints,
            STORE=config.store,
            num_warps=made.warps,
            launch_pdl=pdl,
        )

    return Plan(tuple(map(launch, range(waves + 1))), partials=2 * total * made.parts)


# --- launching


def run_once(made: Plan, call: Call) -> torch.Tensor:
    """Launch through Triton's normal launcher, or its interpreter; a cluster's call as `stretch`."""
    if not isinstance(made.launches[0], Launch):
        made = _stretch(call, Config("stretch"), pdl=False)
    y = torch.empty_like(call.x)
    partials = torch.empty(made.partials, dtype=torch.float32, device=call.x.device)
    first, *rest = made.launches
    if rest:
        first.run(call.x, partials)
    for launch in rest or [first]:
        launch.run(y, *call[:3], *([partials] if rest else []))
    return y


def make_entry(made: Plan, call: Call) -> Entry:
    """The launches as one entry: a function of the public arguments, as `Launch.entry` makes of one launch."""
    if len(made.launches) > 1:
        return _pair_entry(made, call) if len(made.launches) == 2 else _waves_entry(made, call)
    if isinstance(made.launches[0], Launch):
        return made.launches[0].entry(call[:3], call[3:], outputs=[0], device=call.x.device.index)  # like x
    return _cluster_entry(made, call)


def _pair_entry(made: Plan, call: Call) -> Entry:
    """Two launches as one entry. Their own entries check what each of them is given, and the second allocates y.

    The partial results get memory of the call's own, so that calls on several streams and in CUDA graphs never meet.
    Statistics that were taken before the second entry refused the call are of no use, and do no harm.
    """
    x, index = call.x, call.x.device.index
    elements = x.numel()
    partials = torch.empty(made.partials, dtype=torch.float32, device=x.device)
    new_partials = _allocator(partials)
    statistics = made.launches[0].entry((x, partials), device=index)
    output = made.launches[1].entry((*call[:3], partials), call[3:], outputs=[0], device=index)

    def entry(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float) -> Any:
        if x.numel() != elements:  # spares most other calls the allocation
            return MISS
        between = new_partials()
        if statistics(x, between) is MISS:
            return MISS
        return output(x, weight, bias, between, num_groups, eps)

    return entry


def _waves_entry(made: Plan, call: Call) -> Entry:
    """Many launches as one entry."""
    device = call.x.device
    check = guard(call)
    new_y = _allocator(call.x)
    new_partials = _allocator(torch.empty(made.partials, dtype=torch.float32, device=device))
    first, *rest = (launch.bind(device.index) for launch in made.launches)

    def entry(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float) -> Any:
        if not check(x, weight, bias, num_groups, eps):
            return MISS
        y, partials = new_y(), new_partials()
        source, between = x.data_ptr(), partials.data_ptr()
        pointers = (y.data_ptr(), source, weight.data_ptr(), bias.data_ptr(), between)
        first(source, between)
        for run in rest:
            run(*pointers)
        return y

    return entry


def _cluster_entry(made: Plan, call: Call) -> Entry:
    """The launch of a cluster kernel as an entry. It does not take an x that is not aligned to 16 bytes."""
    device = call.x.device
    check = guard(call)
    new_y = _allocator(call.x)
    several = torch.cuda.device_count() > 1
    with torch.cuda.device(device):
        run = made.launches[0].bind()

    def entry(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float) -> Any:
        if not check(x, weight, bias, num_groups, eps) or x.data_ptr() % VECTOR_BYTES:
            return MISS
        y = new_y()
        if several:
            with torch.cuda.device(device):
                run(y, x, weight, bias)
        else:
            run(y, x, weight, bias)
        return y

    return entry


def _allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Allocates contiguous tensors like this one, which it does not keep."""
    function, arguments = allocation(like)
    if function is None or arguments is None or torch.cuda.device_count() > 1:  # it knows the current device only
        return partial(torch.empty, like.shape, dtype=like.dtype, device=like.device)
    return partial(function, *arguments)
