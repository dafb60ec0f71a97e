"""GroupNorm with SiLU where a cluster of blocks holds a group in its registers: a CuTe DSL kernel.

Every block of the cluster reads its share of the group once, leaves its mean and centred squares in the shared memory
of all blocks, and combines them in the order of the blocks. Blocks of a cluster run at the same time by contract of the
launch, so that waiting for each other is safe; nothing passes through global memory and nothing is kept between calls.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor

from kda_core.launch import Binary, compile_cute, environment_stream

WARP = 32
LOG2_E = 1.4426950408889634


@cute.kernel
def cluster_kernel(
    mY: cute.Tensor,  # (total * n)
    mX: cute.Tensor,  # (total * n)
    mW: cute.Tensor,  # (groups * group_channels)
    mB: cute.Tensor,  # (groups * group_channels)
    n: Int32,  # elements of a group, whole vectors
    s: Int32,  # elements of a channel, whole vectors
    groups: Int32,
    group_channels: Int32,
    eps: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    """One cluster: a group. A thread has `tiles` vectors of 16 bytes."""
    vector = const_expr(128 // mX.element_type.width)
    share = const_expr(tiles * warps * WARP * vector)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    group = block // blocks
    first = rank * share + thread * vector  # where in the group this thread begins
    first_channel = Int32(Uint32(group) % Uint32(groups)) * group_channels

    smem = cutlass.memory.SmemAllocator()
    sMean = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sSquares = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sWarp = smem.allocate_tensor(Float32, cute.make_layout(2 * warps))
    arrived = smem.allocate_array(Int64)  # an mbarrier

    # Nobody may write into the shared memory of a block that has not begun, and is not ready to count what arrives.
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, 2 * 4 * blocks)
    cute.arch.cluster_arrive_relaxed()

    # The group's last vector stands in for what is behind its end: no branch then keeps one load from the next.
    rAt = cute.make_rmem_tensor(cute.make_layout(tiles), Int32)
    rChannel = cute.make_rmem_tensor(cute.make_layout(tiles), Int32)
    for tile in cutlass.range_constexpr(tiles):
        rAt[tile] = cutlass.min(first + tile * warps * WARP * vector, n - vector)
        rChannel[tile] = first_channel + Int32(Uint32(rAt[tile]) // Uint32(s))
    if const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    rX = cute.make_rmem_tensor(cute.make_layout((vector, tiles)), mX.element_type)
    rW = cute.make_rmem_tensor(cute.make_layout(tiles), mW.element_type)
    rB = cute.make_rmem_tensor(cute.make_layout(tiles), mB.element_type)
    base = cute.assume(Int64(group) * Int64(n), divby=vector)
    for tile in cutlass.range_constexpr(tiles):
        at = cute.assume(rAt[tile], divby=vector)
        gX = cute.make_tensor(mX.iterator + base + at, cute.make_layout(vector))
        cute.autovec_copy(gX, rX[None, tile])
    for tile in cutlass.range_constexpr(tiles):
        rW[tile] = mW[rChannel[tile]]
        rB[tile] = mB[rChannel[tile]]

    mean, squares = _moments(rX, sWarp, first, n, _share(n, rank, share), warps)

    cute.arch.cluster_wait()
    if thread < blocks:  # to every block, this one included
        cute.arch.store_async_dsmem(sMean.iterator + rank, mean.bitcast(Int32), arrived, thread)
        cute.arch.store_async_dsmem(sSquares.iterator + rank, squares.bitcast(Int32), arrived, thread)
    cute.arch.mbarrier_wait(arrived, 0)

    mean, squares = _combine(sMean, sSquares, n, share, blocks)
    scale = cute.math.rsqrt(squares / Float32(n) + Float32(eps))

    rY = cute.make_rmem_tensor(cute.make_layout(vector), mY.element_type)
    for tile in cutlass.range_constexpr(tiles):
        at = first + tile * warps * WARP * vector
        if at < n:
            weight = rW[tile].to(Float32) * scale
            bias = rB[tile].to(Float32)
            for i in cutlass.range_constexpr(vector):
                normed = (rX[i, tile].to(Float32) - mean) * weight + bias
                rY[i] = _silu(normed, mY.element_type.width == 32).to(mY.element_type)
            gY = cute.make_tensor(mY.iterator + base + cute.assume(at, divby=vector), cute.make_layout(vector))
            cute.autovec_copy(rY, gY)


@cute.jit
def _share(n: Int32, rank: Int32, share: cutlass.Constexpr) -> Float32:
    """Elements of block `rank`."""
    return Float32(cutlass.max(cutlass.min(n - rank * share, share), 0))


@cute.jit
def _moments(
    rX: cute.Tensor,  # (vector, tiles)
    sWarp: cute.Tensor,  # (2 * warps)
    first: Int32,
    n: Int32,
    count: Float32,
    warps: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """Mean and centred squares of a block's share, in two passes over registers; only the group's elements count."""
    vector = const_expr(cute.size(rX, mode=[0]))
    total = Float32(0.0)
    for tile in cutlass.range_constexpr(cute.size(rX, mode=[1])):
        if first + tile * warps * WARP * vector < n:
            for i in cutlass.range_constexpr(vector):
                total += rX[i, tile].to(Float32)
    mean = _block_sum(total, sWarp, 0, warps) / cutlass.max(count, Float32(1.0))
    squares = Float32(0.0)
    for tile in cutlass.range_constexpr(cute.size(rX, mode=[1])):
        if first + tile * warps * WARP * vector < n:
            for i in cutlass.range_constexpr(vector):
                centred = rX[i, tile].to(Float32) - mean
                squares += centred * centred
    return mean, _block_sum(squares, sWarp, warps, warps)


@cute.jit
def _combine(
    sMean: cute.Tensor,  # (blocks)
    sSquares: cute.Tensor,  # (blocks)
    n: Int32,
    share: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """Mean and centred squares of the group, by Chan's formula in the order of the blocks."""
    # Means are taken relative to the first one, so that what they have in common costs no digits.
    common = sMean[0]
    shift = Float32(0.0)
    for i in cutlass.range_constexpr(blocks):
        shift += _share(n, Int32(i), share) * (sMean[i] - common)
    shift = shift / Float32(n)
    squares = Float32(0.0)
    for i in cutlass.range_constexpr(blocks):
        apart = sMean[i] - common - shift
        squares += sSquares[i] + _share(n, Int32(i), share) * apart * apart
    return common + shift, squares


@cute.jit
def _block_sum(value: Float32, sWarp: cute.Tensor, first: cutlass.Constexpr, warps: cutlass.Constexpr) -> Float32:
    """The sum over all threads of a block, in a fixed order, through `warps` numbers of shared memory from `first`."""
    value = cute.arch.warp_reduction_sum(value)
    warp = cute.arch.warp_idx()  # a shuffle, which needs all lanes
    if cute.arch.lane_idx() == 0:
        sWarp[first + warp] = value
    cute.arch.sync_threads()
    total = Float32(0.0)
    for i in cutlass.range_constexpr(warps):
        total += sWarp[first + i]
    return total


@cute.jit
def _silu(x: Float32, exact: cutlass.Constexpr) -> Float32:
    """SiLU, x / (1 + exp(-x)); for 16 bits 1 / a is rsqrt(a)^2, which is off by 3e-7 of its value."""
    power = 1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True)
    y = x / power
    if const_expr(not exact):
        root = cute.math.rsqrt(power, fastmath=True)
        y = x * root * root
    return y


@cute.jit
def launch(
    mY: cute.Tensor,
    mX: cute.Tensor,
    mW: cute.Tensor,
    mB: cute.Tensor,
    n: Int32,
    s: Int32,
    total: Int32,
    groups: Int32,
    group_channels: Int32,
    eps: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
    stream: driver.CUstream,
):
    """One cluster a group."""
    cluster_kernel(mY, mX, mW, mB, n, s, groups, group_channels, eps, blocks, warps, tiles, pdl).launch(
        grid=[total * blocks, 1, 1],
        block=[warps * WARP, 1, 1],
        cluster=[blocks, 1, 1],
        stream=stream,
        use_pdl=pdl,
    )


_COMPILING = Lock()
"""Two threads in the DSL's compiler at a time lose each other's results."""
DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16, torch.float32: Float32}


@dataclass(frozen=True)
class ClusterLaunch:
    """One launch of the kernel, in the manner of `kda_core.launch.Launch`: what `launches` hands out."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of x, weight and bias."""
    dims: int
    """Dimensions of x."""
    sizes: tuple[int, int, int, int, int]
    """Elements of a group and of a channel, groups of all batches and of one, channels of a group."""
    eps: float
    blocks: int
    warps: int
    tiles: int
    pdl: bool

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return "cluster_kernel"

    @property
    def _compiled_for(self) -> tuple[Any, ...]:
        return self.dtypes, self.dims, self.eps, self.blocks, self.warps, self.tiles, self.pdl

    @property
    def variant(self) -> str:
        """What tells this compilation from others: all but the sizes."""
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        cut = f"blocks={self.blocks} warps={self.warps} tiles={self.tiles}"
        return f"{dtypes} dims={self.dims} eps={self.eps} {cut} pdl={self.pdl}"

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        with TemporaryDirectory() as folder, _COMPILING:  # a cubin is only kept together with a file
            options = f"--gpu-arch {target} --keep-cubin --dump-dir {folder}"
            compiled = _compiled(*self._compiled_for, options=options)
        return Binary(compiled.artifacts.CUBIN, dynamic_shared_bytes=8 * (self.blocks + self.warps + 1))

    def bind(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """Compile for the current device: a function of y, x, weight and bias, which launches on the current stream."""
        run, sizes = _bound(*self._compiled_for), self.sizes

        def bound(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
            run(y, x, weight, bias, *sizes)

        return bound


def _compiled(
    dtypes: tuple[torch.dtype, ...],
    dims: int,
    eps: float,
    blocks: int,
    warps: int,
    tiles: int,
    pdl: bool,
    options: str = "",
) -> Any:
    """The kernel as a tvm-ffi function of y, x, weight, bias and five sizes."""
    x, weight, bias = (DTYPES[dtype] for dtype in dtypes)
    order = tuple(reversed(range(dims)))
    pictures = [
        make_fake_compact_tensor(x, tuple(cute.sym_int64() for _ in order), stride_order=order, assumed_align=16)
        for _ in "yx"
    ]
    vectors = [make_fake_compact_tensor(dtype, (cute.sym_int(),)) for dtype in (weight, bias)]
    constants = (eps, blocks, warps, tiles, pdl)
    return compile_cute(launch, *pictures, *vectors, *[Int32(0)] * 5, *constants, environment_stream(), options=options)


@functools.cache
def _bound(*compiled_for: Any) -> Any:
    """The kernel for the current device's kind; the DSL takes a second to compile, and sizes are arguments."""
    with _COMPILING:
        return _compiled(*compiled_for)
