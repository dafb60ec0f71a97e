"""GroupNorm with SiLU where a cluster of blocks holds a group in its registers: a CuTe DSL kernel.

Every block of the cluster reads its share of the group once, leaves its mean and centred squares in the shared memory
of all blocks, and combines them in a fixed order. Blocks of a cluster run at the same time by contract of the launch,
so that waiting for each other is safe; nothing passes through global memory and nothing is kept between calls.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from . import dsl
from .plans import CLUSTER_TILES

RESIDENT_WARPS = ((8, 32), (12, 24), (CLUSTER_TILES, 16))
"""(tiles, warps): up to so many tiles, so many warps are resident on a multiprocessor. That leaves a thread 64, 80 or
128 registers."""


class Numbers(NamedTuple):
    """A call's sizes, as the kernel gets them."""

    vectors: Int32
    """Vectors of a group."""
    by_channel: Int32
    """Factor of `dsl.divisor` for the vectors of a channel; the next field is its shift."""
    channel_shift: Int32
    groups: Int32
    group_channels: Int32


@dataclass(frozen=True)
class Cut(dsl.Cut):
    """Constants of the kernel."""

    blocks: int


@cute.kernel
def cluster_kernel(addresses: tuple, numbers: Numbers, eps: Float32, cut: cutlass.Constexpr):
    """One cluster: a group, from x to y of [total, n], with weight and bias of [groups * group_channels]."""
    y, x, weight, bias = addresses
    dtype, blocks, threads, vectors = cut.dtype, cut.blocks, cut.threads, numbers.vectors
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    group = block // blocks
    first = rank * cut.share + thread  # the first vector of this thread
    length = Float32(vectors * (128 // dtype.width))
    mW = dsl.channels_of(group, cut.weight_dtype, weight, numbers)
    mB = dsl.channels_of(group, cut.bias_dtype, bias, numbers)

    smem = cutlass.memory.SmemAllocator()
    sMean = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sSquares = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sWarp = smem.allocate_tensor(Float32, cute.make_layout(2 * cut.warps))
    arrived = smem.allocate_array(Int64)  # an mbarrier
    # The last array is as long as the launch's shared memory allows: weight and bias of every channel.
    sAffine = cute.make_tensor(smem.allocate_array(Float32, 2), cute.make_layout((2, numbers.group_channels)))

    # No block may write into another's shared memory before that block has begun and its mbarrier is set up.
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, 2 * 4 * blocks)
    cute.arch.cluster_arrive_relaxed()
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()

    rX = cute.make_rmem_tensor(cute.make_layout((dsl.WORDS, cut.tiles)), Uint32)
    dsl.read(rX, x, group, first, threads, vectors)

    # All threads issue these loads, too, before the branch; only threads that have a channel store the results.
    near = cutlass.min(thread, numbers.group_channels - 1)
    one, other = dsl.scaled(mW[near], dtype), dsl.scaled(mB[near], dtype)
    if thread < numbers.group_channels:
        sAffine[0, thread], sAffine[1, thread] = one, other
    for channel in cutlass.range(thread + threads, numbers.group_channels, threads, unroll=1):
        sAffine[0, channel], sAffine[1, channel] = dsl.scaled(mW[channel], dtype), dsl.scaled(mB[channel], dtype)

    mean, squares = _moments(rX, sWarp, vectors, rank, first, cut)

    cute.arch.cluster_wait()
    if thread < blocks:  # to every block, this one included
        cute.arch.store_async_dsmem(sMean.iterator + rank, mean.bitcast(Int32), arrived, thread)
        cute.arch.store_async_dsmem(sSquares.iterator + rank, squares.bitcast(Int32), arrived, thread)
    cute.arch.mbarrier_wait(arrived, 0)

    mean, squares = _combine(sMean, sSquares, length, vectors, cut)
    rX = dsl.afresh(rX)
    scale = cute.math.rsqrt(squares * dsl.quotient(Float32(1.0), length) + eps)

    behind = vectors - first
    to_own = y + 16 * (Int64(group) * Int64(vectors)) + 16 * Int64(first)
    rY = cute.make_rmem_tensor(cute.make_layout(dsl.WORDS * 32 // dtype.width), dtype)
    for tile in cutlass.range_constexpr(cut.tiles):
        if tile * threads < behind:
            channel = dsl.ratio(first + tile * threads, numbers.by_channel, numbers.channel_shift)
            slope, offset = dsl.affine(sAffine[0, channel], sAffine[1, channel], mean, scale, dtype)
            words = dsl.output(rX, dtype, tile, mean, slope, offset, rY)
            cute.autovec_copy(words, dsl.words_at(to_own + 16 * tile * threads))


def _held(vectors, rank, cut):
    """Elements of the group that block `rank` holds."""
    return Float32(cutlass.max(cutlass.min(vectors - rank * cut.share, cut.share), 0) * (128 // cut.dtype.width))


@cute.jit
def _moments(rX, sWarp, vectors, rank, first, cut: cutlass.Constexpr):
    """Mean and centred squares of a block's share, in two passes over registers; only the group's elements count."""
    behind = vectors - first
    total = dsl.total_of(rX, cut.dtype, behind, cut.threads)
    count = cutlass.max(_held(vectors, rank, cut), Float32(1.0))
    mean = dsl.quotient(_block_sum(total, sWarp, 0, cut.warps), count)
    squares = dsl.squares_of(dsl.afresh(rX), cut.dtype, mean, behind, cut.threads)
    return mean, _block_sum(squares, sWarp, cut.warps, cut.warps)


@cute.jit
def _combine(sMean, sSquares, length, vectors, cut: cutlass.Constexpr):
    """Mean and centred squares of the group, by Chan's formula: a lane takes a block, and every lane has the result."""
    i = cute.arch.lane_idx() % cut.blocks
    count = _held(vectors, i, cut)
    # Means are taken relative to the first one, so that a common offset costs no digits.
    common = sMean[0]
    apart = sMean[i] - common
    shift = dsl.quotient(cute.arch.warp_reduction_sum(count * apart, threads_in_group=cut.blocks), length)
    apart = apart - shift
    squares = sSquares[i] + count * apart * apart
    return common + shift, cute.arch.warp_reduction_sum(squares, threads_in_group=cut.blocks)


@cute.jit
def _block_sum(value, sWarp, first: cutlass.Constexpr, warps: cutlass.Constexpr):
    """The sum over all threads of a block, in a fixed order, through `warps` numbers of shared memory from `first`."""
    value = cute.arch.warp_reduction_sum(value)
    warp = cute.arch.warp_idx()  # a shuffle, which needs all lanes
    if cute.arch.lane_idx() == 0:
        sWarp[first + warp] = value
    cute.arch.sync_threads()
    return dsl.tree([sWarp[first + i] for i in range(warps)])


def shared_bytes(blocks, warps, group_channels):
    """Shared memory of a block: two floats per block and per warp, an mbarrier, weight and bias of every channel."""
    return 8 * (blocks + warps + 1 + group_channels)


@cute.jit
def launch(
    addresses: tuple, numbers: tuple, eps: Float32, constants: cutlass.Constexpr, blocks: Int32, stream: driver.CUstream
):
    """Launch `blocks` blocks, one cluster for each group."""
    numbers, cut = Numbers(*numbers), Cut(*constants)
    cluster_kernel(addresses, numbers, eps, cut).launch(
        grid=[blocks, 1, 1],
        block=[cut.threads, 1, 1],
        cluster=[cut.blocks, 1, 1],
        smem=shared_bytes(cut.blocks, cut.warps, numbers.group_channels),
        stream=stream,
        use_pdl=cut.pdl,
        min_blocks_per_mp=next(held for most, held in RESIDENT_WARPS if cut.tiles <= most) // cut.warps,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class ClusterLaunch(dsl.CuteLaunch):
    """One launch of the kernel, of y, x, weight and bias. A group has at most CLUSTER_CHANNELS channels."""

    name, function = "cluster_kernel", staticmethod(launch)
    cut, numbers = Cut, Numbers

    def shape(self) -> tuple[int, int, Numbers, int]:
        """See `dsl.CuteLaunch`."""
        vectors, channel, total, groups, group_channels = self.sizes
        blocks, numbers = self.config.blocks, Numbers(vectors, *dsl.divisor(channel), groups, group_channels)
        return total * blocks, blocks, numbers, shared_bytes(blocks, self.config.warps, group_channels)
