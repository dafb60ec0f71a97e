"""GroupNorm with SiLU where a cluster of blocks holds a group in its registers: a CuTe DSL kernel.

Every block of the cluster reads its share of the group once, leaves its mean and centred squares in the shared memory
of all blocks, and combines them in a fixed order. Blocks of a cluster run at the same time by contract of the launch,
so that waiting for each other is safe; nothing passes through global memory and nothing is kept between calls.

A special function takes eight cycles where a sum takes one, so the output is bound by them: in 16 bits four elements
share a reciprocal, which leaves 1.25 of them an element where exp2 and a root of its own would be 2.
"""

import functools
from dataclasses import dataclass, field
from struct import pack
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32, Uint64, const_expr

from kda_core.cubin import Address, CubinLaunch
from kda_core.cute import cute_cubin
from kda_core.launch import Binary, Chain, Run

from .tuning import CLUSTER_TILES, VECTOR_BYTES

WARP = 32
WORDS = 4
"""Of a vector."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
KEPT_TILES = 4
"""Up to so many vectors of a thread are also kept as floats, where the registers allow it."""
RESIDENT_WARPS = ((8, 32), (12, 24), (CLUSTER_TILES, 16))
"""Up to so many tiles, so many warps of a multiprocessor; what they leave a thread are 64, 80 and 128 registers."""
MOST_POWER = 31.0
"""Largest exponent of two under the reciprocal: the product of four 1 + 2^31 and its reciprocal are normal numbers.
SiLU of what would need a larger one, below -21.5, is about -1e-8 instead of a number between that and 0."""


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
    mW = cute.make_tensor(_pointer(weight_dtype, weight) + first_channel, cute.make_layout(group_channels))
    mB = cute.make_tensor(_pointer(bias_dtype, bias) + first_channel, cute.make_layout(group_channels))

    smem = cutlass.memory.SmemAllocator()
    sMean = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sSquares = smem.allocate_tensor(Float32, cute.make_layout(blocks))
    sWarp = smem.allocate_tensor(Float32, cute.make_layout(2 * warps))
    arrived = smem.allocate_array(Int64)  # an mbarrier
    # The last array, as long as the launch makes it: weight and bias of every channel.
    sAffine = cute.make_tensor(smem.allocate_array(Float32, 2), cute.make_layout((2, group_channels)))

    # Nobody may write into the shared memory of a block that has not begun, and is not ready to count what arrives.
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, 2 * 4 * blocks)
    cute.arch.cluster_arrive_relaxed()
    if const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    # The group's last vector stands in for what is behind its end: no branch then keeps one load from the next.
    rX = cute.make_rmem_tensor(cute.make_layout((WORDS, tiles)), Uint32)
    before = 16 * (Int64(group) * Int64(vectors))  # bytes
    for tile in cutlass.range_constexpr(tiles):
        at = cutlass.min(first + tile * threads, vectors - 1)
        cute.autovec_copy(_vector(x + before + 16 * Int64(at)), rX[None, tile])

    # Nor does the branch of those threads that have a channel.
    near = cutlass.min(thread, group_channels - 1)
    one, other = _scaled(mW[near], exact), _scaled(mB[near], exact)
    if thread < group_channels:
        sAffine[0, thread], sAffine[1, thread] = one, other
    for channel in cutlass.range(thread + threads, group_channels, threads, unroll=1):
        sAffine[0, channel], sAffine[1, channel] = _scaled(mW[channel], exact), _scaled(mB[channel], exact)

    mean, squares = _moments(rX, dtype, sWarp, first, vectors, rank, share, warps)

    cute.arch.cluster_wait()
    if thread < blocks:  # to every block, this one included
        cute.arch.store_async_dsmem(sMean.iterator + rank, mean.bitcast(Int32), arrived, thread)
        cute.arch.store_async_dsmem(sSquares.iterator + rank, squares.bitcast(Int32), arrived, thread)
    cute.arch.mbarrier_wait(arrived, 0)

    mean, squares = _combine(sMean, sSquares, dtype, length, vectors, share, blocks)
    rX = _afresh(rX)
    scale = cute.math.rsqrt(squares * _quotient(Float32(1.0), length) + eps)

    behind = vectors - first
    to_own = y + before + 16 * Int64(first)
    rY = cute.make_rmem_tensor(cute.make_layout(WORDS * 32 // dtype.width), dtype)
    for tile in cutlass.range_constexpr(tiles):
        if tile * threads < behind:
            twice = Uint64(Uint32(2 * (first + tile * threads)))
            channel = Int32(Uint32(twice * Uint64(Uint32(magic)) >> Uint64(32)) >> Uint32(shift))
            values = _output(rX, dtype, tile, mean, sAffine[0, channel] * scale, sAffine[1, channel])
            for i in cutlass.range_constexpr(len(values)):
                rY[i] = values[i].to(dtype)
            cute.autovec_copy(cute.recast_tensor(rY, Uint32), _vector(to_own + 16 * tile * threads))


def _pointer(dtype, address, align=None):
    """Into global memory."""
    return cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def _vector(address):
    """The 16 bytes at an address."""
    return cute.make_tensor(_pointer(Uint32, address, 16), cute.make_layout(WORDS))


def _afresh(rX):
    """The same words, of which the compiler does not know that: it then converts them again and keeps no floats."""
    if cute.size(rX, mode=[1]) <= KEPT_TILES:
        return rX
    rZ = cute.make_rmem_tensor(rX.layout, Uint32)
    for i in range(cute.size(rX)):
        rZ[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[rX[i]])
    return rZ


def _element(rX, dtype, i, tile):
    """Element i of a vector as float32: one instruction, which extracting 16 bits and converting them is not."""
    if dtype is Float32:
        return rX[i, tile].bitcast(Float32)
    word, upper = rX[i // 2, tile], i % 2
    if dtype is BFloat16:
        return (word & Uint32(0xFFFF0000) if upper else word << Uint32(16)).bitcast(Float32)
    return Uint16(word >> Uint32(16) if upper else word).bitcast(Float16).to(Float32)


def _scaled(number, exact):
    """Weight or bias: in 16 bits for the exponent of SiLU, -n log2(e)."""
    return number.to(Float32) * (1.0 if exact else -LOG2_E)


def _tree(values):
    """The sum of a power of two of values, in pairs."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _quotient(a, b):
    """The quotient to the last bit but one, without a division's special cases: a is finite, b no subnormal number."""
    inverse = cute.arch.rcp_approx(b)
    near = a * inverse
    return near + (a - near * b) * inverse


def _held(vectors, rank, share, dtype):
    """Elements of block `rank`."""
    return Float32(cutlass.max(cutlass.min(vectors - rank * share, share), 0) * (128 // dtype.width))


@cute.jit
def _moments(
    rX: cute.Tensor,  # (words, tiles)
    dtype: cutlass.Constexpr,
    sWarp: cute.Tensor,  # (2 * warps)
    first: Int32,
    vectors: Int32,
    rank: Int32,
    share: cutlass.Constexpr,
    warps: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """Mean and centred squares of a block's share, in two passes over registers; only the group's elements count."""
    tiles = const_expr(cute.size(rX, mode=[1]))
    elements = const_expr(range(128 // dtype.width))
    nothing = Float32(0.0)
    behind = vectors - first
    total = nothing
    for tile in cutlass.range_constexpr(tiles):
        inside = tile * warps * WARP < behind
        part = _tree([_element(rX, dtype, i, tile) for i in elements])
        total += cutlass.select_(inside, part, nothing)
    count = cutlass.max(_held(vectors, rank, share, dtype), Float32(1.0))
    mean = _quotient(_block_sum(total, sWarp, 0, warps), count)
    rX = _afresh(rX)
    squares = nothing
    for tile in cutlass.range_constexpr(tiles):
        inside = tile * warps * WARP < behind
        centred = [_element(rX, dtype, i, tile) - mean for i in elements]
        parts = [centred[0] * centred[0], centred[1] * centred[1]]
        for i in elements[2:]:
            parts[i % 2] = parts[i % 2] + centred[i] * centred[i]
        squares += cutlass.select_(inside, parts[0] + parts[1], nothing)
    return mean, _block_sum(squares, sWarp, warps, warps)


@cute.jit
def _combine(
    sMean: cute.Tensor,  # (blocks)
    sSquares: cute.Tensor,  # (blocks)
    dtype: cutlass.Constexpr,
    length: Float32,
    vectors: Int32,
    share: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """Mean and centred squares of the group, by Chan's formula: a lane takes a block, and every lane has the result."""
    i = cute.arch.lane_idx() % blocks
    count = _held(vectors, i, share, dtype)
    # Means are taken relative to the first one, so that what they have in common costs no digits.
    common = sMean[0]
    apart = sMean[i] - common
    shift = _quotient(cute.arch.warp_reduction_sum(count * apart, threads_in_group=blocks), length)
    apart = apart - shift
    squares = sSquares[i] + count * apart * apart
    return common + shift, cute.arch.warp_reduction_sum(squares, threads_in_group=blocks)


@cute.jit
def _block_sum(value: Float32, sWarp: cute.Tensor, first: cutlass.Constexpr, warps: cutlass.Constexpr) -> Float32:
    """The sum over all threads of a block, in a fixed order, through `warps` numbers of shared memory from `first`."""
    value = cute.arch.warp_reduction_sum(value)
    warp = cute.arch.warp_idx()  # a shuffle, which needs all lanes
    if cute.arch.lane_idx() == 0:
        sWarp[first + warp] = value
    cute.arch.sync_threads()
    return _tree([sWarp[first + i] for i in range(warps)])


def _output(rX, dtype, tile, mean, slope, shift):
    """The elements of a vector, normalised and through SiLU; slope and shift are `_scaled`."""
    if dtype is Float32:
        return [_silu((_element(rX, dtype, i, tile) - mean) * slope + shift) for i in range(WORDS)]
    shift = shift - mean * slope
    exponents = [_element(rX, dtype, i, tile) * slope + shift for i in range(2 * WORDS)]
    return [*_silu_of_four(*exponents[:4]), *_silu_of_four(*exponents[4:])]


def _silu(n):
    """SiLU, n / (1 + exp(-n))."""
    return n / (1.0 + cute.math.exp2(n * -LOG2_E, fastmath=True))


def _silu_of_four(*exponents):
    """SiLU of -ln(2) z for four z, z -ln(2) / (1 + 2^z): 1 / a = b / (a b), so that one reciprocal is enough."""
    z = [cute.arch.fmin(one, MOST_POWER, nan=True) for one in exponents]
    p = [cute.math.exp2(one, fastmath=True) for one in z]
    # Of two denominators 1 + p only one is formed; the other is a factor of multiply-adds: (1 + p) b = p b + b.
    b = [p[1] + 1.0, p[3] + 1.0]
    pairs = [p[0] * b[0] + b[0], p[2] * b[1] + b[1]]
    inverse = cute.arch.rcp_approx(pairs[0] * pairs[1]) * -LN_2
    halves = [inverse * pairs[1], inverse * pairs[0]]
    sigmas = [halves[0] * b[0], halves[0] * p[0] + halves[0], halves[1] * b[1], halves[1] * p[2] + halves[1]]
    return [one * sigma for one, sigma in zip(z, sigmas, strict=True)]


def shared_bytes(blocks, warps, group_channels):
    """Of a block: two numbers of every block and warp, an mbarrier, weight and bias of every channel."""
    return 8 * (blocks + warps + 1 + group_channels)


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


DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16, torch.float32: Float32}


def divisor(vectors: int) -> tuple[int, int]:
    """Factor and shift by which a natural number below 2^31 is divided: the upper half of 2 a factor, shifted.

    Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994), theorem 4.2.
    """
    shift = (vectors - 1).bit_length()
    return (1 << 31 + shift) // vectors + 1, shift


@dataclass(frozen=True)
class ClusterLaunch:
    """One launch of the kernel, in the manner of `kda_core.launch.Launch`: its tensors are y, x, weight and bias."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of x, weight and bias."""
    sizes: tuple[int, int, int, int, int]
    """Elements of a group and of a channel, both of whole vectors; groups of all batches and of one, channels of a
    group, `CLUSTER_CHANNELS` at most."""
    eps: float
    blocks: int
    """Of a cluster: 1, 2, 4, 8 or 16."""
    warps: int
    tiles: int
    pdl: bool
    otherwise: Chain = field(compare=False, repr=False)
    """What takes x where it is not aligned to 16 bytes; its output is y, its arguments are x, weight and bias."""

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return "cluster_kernel"

    @property
    def variant(self) -> str:
        """What tells this compilation from others: all but numbers."""
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{dtypes} blocks={self.blocks} warps={self.warps} tiles={self.tiles} pdl={self.pdl}"

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constant parameters."""
        return *(DTYPES[dtype] for dtype in self.dtypes), self.blocks, self.warps, self.tiles, self.pdl

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        elements, channel, total, groups, group_channels = self.sizes
        vector = VECTOR_BYTES // self.dtypes[0].itemsize
        factor, shift = divisor(channel // vector)
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(total * self.blocks, 1, 1),
            threads=self.warps * WARP,
            params=(
                Address.ALIGNED,
                Address.ALIGNED,
                Address.ANY,
                Address.ANY,
                *(pack("<I", number) for number in (elements // vector, factor, shift, groups, group_channels)),
                pack("<f", self.eps),
            ),
            cluster=self.blocks,
            dynamic_shared_bytes=shared_bytes(self.blocks, self.warps, group_channels),
            dependent=self.pdl,
            otherwise=self.otherwise.run_at,
        )

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        return Binary(cubin := _code(self.constants, target), self.with_code(cubin).dynamic_shared_bytes)

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one): a function of the four addresses."""
        major, minor = torch.cuda.get_device_capability(device)
        return self.with_code(_code(self.constants, f"sm_{major}{minor}a")).bind(device)

    def run(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of their device."""
        self.bind(tensors[0].device.index)(*(tensor.data_ptr() for tensor in tensors))

    def run_at(self, *addresses: int) -> None:
        """The same for the addresses of tensors on the current device."""
        self.bind()(*addresses)


@functools.cache
def _code(constants: tuple[Any, ...], target: str) -> bytes:
    """The kernel for a target; sizes are arguments."""
    return cute_cubin(launch, *arguments(constants), target=target)


def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `launch` is compiled with; of the numbers only the types matter."""
    return *[Int64(0)] * 4, *[Int32(0)] * 5, Float32(0.0), Int32(0), *constants, driver.CUstream(0)
