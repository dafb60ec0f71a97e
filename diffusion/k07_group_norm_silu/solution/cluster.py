"""GroupNorm with SiLU where a cluster of blocks holds a group in its registers: a CuTe DSL kernel.

Every block of the cluster reads its share of the group once, leaves its mean and centred squares in the shared memory
of all blocks, and combines them in a fixed order. Blocks of a cluster run at the same time by contract of the launch,
so that waiting for each other is safe; nothing passes through global memory and nothing is kept between calls.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kda_core.cubin import CubinLaunch

from .dsl import (
    WARP,
    WORDS,
    CuteLaunch,
    affine,
    afresh,
    divisor,
    merged,
    moments_of,
    output,
    pointer,
    quotient,
    ratio,
    scaled,
    words_at,
)
from .tuning import CLUSTER_TILES, VECTOR_BYTES

BY_WARP = True
RESIDENT_WARPS = ((8, 32), (12, 24), (CLUSTER_TILES, 16))
"""Up to so many tiles, so many warps of a multiprocessor; what they leave a thread are 64, 80 and 128 registers."""


@cute.kernel
def cluster_kernel(
    y: Int64,  # address of [total, n]
    x: Int64,  # address of [total, n]
    weight: Int64,  # address of [groups * group_channels]
    bias: Int64,  # address of [groups * group_channels]
    vectors: Int32,  # of a group
    magic: Int32,  # vectors of a channel, as `divisor` says
    shift: Int32,
    groups: Int32,
    group_channels: Int32,
    eps: Float32,
    dtype: cutlass.Constexpr,
    weight_dtype: cutlass.Constexpr,
    bias_dtype: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """One cluster: a group. A thread has `tiles` vectors of 16 bytes."""
    exact = const_expr(dtype is Float32)
    threads = const_expr(warps * WARP)
    share = const_expr(tiles * threads)  # vectors of a block
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    group = block // blocks
    first = rank * share + thread  # the first vector of this thread
    length = Float32(vectors * (128 // dtype.width))
    first_channel = Int32(Uint32(group) % Uint32(groups)) * group_channels
    mW = cute.make_tensor(pointer(weight_dtype, weight) + first_channel, cute.make_layout(group_channels))
    mB = cute.make_tensor(pointer(bias_dtype, bias) + first_channel, cute.make_layout(group_channels))

    smem = cutlass.memory.SmemAllocator()
    senders = const_expr(blocks * warps if BY_WARP else blocks)
    arrivals = smem.allocate_array(Int64, senders)
    sMoments = cute.make_tensor(cute.recast_ptr(arrivals, dtype=Float32), cute.make_layout((2, senders)))
    sWarp = smem.allocate_tensor(Float32, cute.make_layout((3, warps)))
    arrived = smem.allocate_array(Int64)  # an mbarrier
    # The last array, as long as the launch makes it: weight and bias of every channel.
    sAffine = cute.make_tensor(smem.allocate_array(Float32, 2), cute.make_layout((2, group_channels)))

    # Nobody may write into the shared memory of a block that has not begun, and is not ready to count what arrives.
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, 8 * senders)
    cute.arch.cluster_arrive_relaxed()
    if const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    # The group's last vector stands in for what is behind its end: no branch then keeps one load from the next.
    rX = cute.make_rmem_tensor(cute.make_layout((WORDS, tiles)), Uint32)
    before = 16 * (Int64(group) * Int64(vectors))  # bytes
    for tile in cutlass.range_constexpr(tiles):
        at = cutlass.min(first + tile * threads, vectors - 1)
        cute.autovec_copy(words_at(x + before + 16 * Int64(at)), rX[None, tile])

    # Nor does the branch of those threads that have a channel.
    near = cutlass.min(thread, group_channels - 1)
    one, other = scaled(mW[near], exact), scaled(mB[near], exact)
    if thread < group_channels:
        sAffine[0, thread], sAffine[1, thread] = one, other
    for channel in cutlass.range(thread + threads, group_channels, threads, unroll=1):
        sAffine[0, channel], sAffine[1, channel] = scaled(mW[channel], exact), scaled(mB[channel], exact)

    count, mean, squares = moments_of(rX, dtype, vectors - first, threads)
    warp = cute.arch.warp_idx()  # a shuffle, which needs all lanes
    lane = cute.arch.lane_idx()
    if const_expr(BY_WARP):
        sender = rank * warps + warp
    else:
        if lane == 0:
            sWarp[0, warp], sWarp[1, warp], sWarp[2, warp] = count, mean, squares
        cute.arch.sync_threads()
        if warp == 0:
            at = lane % warps
            _, mean, squares = merged(sWarp[0, at], sWarp[1, at], sWarp[2, at], sWarp[1, 0], warps)
        sender = Int32(rank)
    cute.arch.cluster_wait()
    if (lane < blocks) & (BY_WARP | (warp == 0)):  # to every block, this one included
        cute.arch.store_async_dsmem(arrivals + sender, (mean.bitcast(Int32), squares.bitcast(Int32)), arrived, lane)
    if const_expr(BY_WARP):
        cute.arch.sync_threads()  # of sAffine
    cute.arch.mbarrier_wait(arrived, 0)

    mean, squares = _combine(sMoments, dtype, length, vectors, share, blocks, warps)
    rX = afresh(rX)
    scale = cute.math.rsqrt(squares * quotient(Float32(1.0), length) + eps)

    behind = vectors - first
    to_own = y + before + 16 * Int64(first)
    rY = cute.make_rmem_tensor(cute.make_layout(WORDS * 32 // dtype.width), dtype)
    for tile in cutlass.range_constexpr(tiles):
        if tile * threads < behind:
            channel = ratio(first + tile * threads, magic, shift)
            slope, offset = affine(sAffine[0, channel], sAffine[1, channel], mean, scale, dtype)
            values = output(rX, dtype, tile, mean, slope, offset)
            for i in cutlass.range_constexpr(len(values)):
                rY[i] = values[i].to(dtype)
            cute.autovec_copy(cute.recast_tensor(rY, Uint32), words_at(to_own + 16 * tile * threads))


def _held(left, tiles, stride, width):
    """Vectors before `left` in `tiles` runs of `width`, `stride` apart."""
    left = Uint32(cutlass.max(left, 0))
    full = cutlass.min(left // Uint32(stride), Uint32(tiles))
    rest = cutlass.min(left - full * Uint32(stride), Uint32(width))
    return Int32(full * Uint32(width) + cutlass.select_(full < Uint32(tiles), rest, Uint32(0)))


@cute.jit
def _combine(
    sMoments: cute.Tensor,  # (2, senders)
    dtype: cutlass.Constexpr,
    length: Float32,
    vectors: Int32,
    share: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    warps: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """Mean and centred squares of the group; every lane has the result."""
    threads = const_expr(warps * WARP)
    vector = const_expr(128 // dtype.width)
    senders = const_expr(blocks * warps if BY_WARP else blocks)
    common = sMoments[0, 0]
    moved, squares = Float32(0.0), Float32(0.0)
    lanes = const_expr(min(senders, WARP))
    for i in cutlass.range_constexpr(senders // lanes):
        at = Int32(Uint32(cute.arch.lane_idx()) % Uint32(lanes)) + i * WARP
        if const_expr(BY_WARP):
            block = Int32(Uint32(at) // Uint32(warps))
            held = _held(vectors - block * share - (at - block * warps) * WARP, share // threads, threads, WARP)
        else:
            held = cutlass.max(cutlass.min(vectors - at * share, share), 0)
        count = Float32(held * vector)
        apart = cutlass.select_(held > 0, sMoments[0, at] - common, Float32(0.0))
        moved += count * apart
        squares += sMoments[1, at] + count * apart * apart
    squares = cute.arch.warp_reduction_sum(squares, threads_in_group=lanes)
    moved = cute.arch.warp_reduction_sum(moved, threads_in_group=lanes)
    shift = quotient(moved, length)
    return common + shift, cute.arch.fmax(squares - moved * shift, Float32(0.0), nan=True)


def shared_bytes(blocks, warps, group_channels):
    """Of a block: two numbers of every block and warp, an mbarrier, weight and bias of every channel."""
    return 8 * ((blocks * warps if BY_WARP else blocks) + 1 + group_channels) + 12 * warps + 8


@cute.jit
def launch(
    y: Int64,
    x: Int64,
    weight: Int64,
    bias: Int64,
    vectors: Int32,
    magic: Int32,
    shift: Int32,
    groups: Int32,
    group_channels: Int32,
    eps: Float32,
    total: Int32,
    dtype: cutlass.Constexpr,
    weight_dtype: cutlass.Constexpr,
    bias_dtype: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
    stream: driver.CUstream,
):
    """One cluster a group."""
    numbers = (vectors, magic, shift, groups, group_channels, eps)
    cluster_kernel(y, x, weight, bias, *numbers, dtype, weight_dtype, bias_dtype, blocks, warps, tiles, pdl).launch(
        grid=[total * blocks, 1, 1],
        block=[warps * WARP, 1, 1],
        cluster=[blocks, 1, 1],
        smem=shared_bytes(blocks, warps, group_channels),
        stream=stream,
        use_pdl=pdl,
        min_blocks_per_mp=next(held for most, held in RESIDENT_WARPS if tiles <= most) // warps,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class ClusterLaunch(CuteLaunch):
    """One launch of the kernel, of y, x, weight and bias. A group has at most CLUSTER_CHANNELS channels."""

    blocks: int
    """Of a cluster: 1, 2, 4, 8 or 16."""

    name = "cluster_kernel"
    function = staticmethod(launch)

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `launch` is compiled with."""
        return *[Int64(0)] * 4, *[Int32(0)] * 5, Float32(0.0), Int32(0), *constants, driver.CUstream(0)

    @property
    def cuts(self) -> dict[str, Any]:
        """The kernel's constant parameters behind the dtypes."""
        return {"blocks": self.blocks, "warps": self.warps, "tiles": self.tiles, "pdl": self.pdl}

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        elements, channel, total, groups, group_channels = self.sizes
        vector = VECTOR_BYTES // self.dtypes[0].itemsize
        numbers = (elements // vector, *divisor(channel // vector), groups, group_channels)
        shared = shared_bytes(self.blocks, self.warps, group_channels)
        return self.described(cubin, total * self.blocks, 0, numbers, shared, self.blocks)
