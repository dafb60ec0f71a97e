"""From a call to its launches: which method takes it, and how it is cut."""

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from kda_core.calls import capability, given, pdl_works
from kda_core.launch import MISS, Chain, Entry, Launch, guard
from kda_core.native import allocation

from .kernels import stretch_kernel, whole_kernel
from .tuning import CLUSTER_VECTORS, EARLY_TILES, LATE_AHEAD, TUNED, VECTOR_BYTES, WHOLE_BYTES, Config, cut, wave_groups

if TYPE_CHECKING:
    from .cluster import ClusterLaunch

Y, PARTIALS, X, WEIGHT, BIAS = range(5)
"""Places in the table of `stretch`: what is returned, what is passed from launch to launch, and the arguments."""


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


def plan(call: Call) -> "Chain | ClusterLaunch":
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    x = call.x
    major = capability(x)
    size = call.elements * x.itemsize
    config = TUNED.select(major, group_bytes=size, bytes=call.groups * size)
    pdl = config.pdl and pdl_works(whole_kernel, major)
    if config.method == "whole" and size <= WHOLE_BYTES:
        return _whole(call, config, pdl)
    made = _cluster(call, config, pdl) if config.method == "cluster" and major >= 9 else None
    return made or stretch(call, config, pdl)


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
        num_warps=made.warps,
        launch_pdl=pdl,
    )
    return launch.chain(len(call.tensors), outputs=[0])  # like x


def _cluster(call: Call, config: Config, pdl: bool) -> "ClusterLaunch | None":
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
    return ClusterLaunch(
        dtypes=(x.dtype, call.weight.dtype, call.bias.dtype),
        dims=x.dim(),
        sizes=(elements, channel, call.groups, *groups),
        eps=float(call.eps),
        blocks=config.blocks,
        warps=config.warps,
        tiles=tiles,
        pdl=pdl,
    )


def stretch(call: Call, config: Config, pdl: bool) -> Chain:
    """Launches that leave each other partial results, in memory of the call's own.

    So calls on several streams and in CUDA graphs never meet.
    """
    x, total = call.x, call.groups
    made = cut(call.elements, call.channel, x.itemsize, config.warps, config.tiles)
    wave = wave_groups(total, call.elements * x.itemsize, config.wave_mb)
    waves = -(-total // wave)
    # Mean and centred squares of every part of every group.
    partials = torch.empty(2 * total * made.parts, dtype=torch.float32, device="meta")

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

    places = ((X, PARTIALS), *[(Y, X, WEIGHT, BIAS, PARTIALS)] * waves)
    return Chain(tuple(map(launch, range(waves + 1))), places, outputs=(0,), scratch=(partials,))  # like x


# --- the cluster's entry


def cluster_entry(launch: "ClusterLaunch", call: Call) -> Entry:
    """A cluster's launch as a function of the public arguments. It does not take an x not aligned to 16 bytes."""
    device = call.x.device
    check = guard(call)
    several = torch.cuda.device_count() > 1
    function, arguments, general = allocation(call.x, device)
    new_y = general if function is None or several else partial(function, *arguments)
    with torch.cuda.device(device):
        run = launch.bind()

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
