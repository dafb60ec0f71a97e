"""Softmax over temperatures where a cluster of blocks holds a row in its registers: a CuTe DSL kernel.

Every block reads its share of the row once, all loads before the first use. A warp takes the exponentials of its
elements, relative to its own maximum, and keeps them in the registers of the logits. Maxima and sums then go through
the block's shared memory and into that of all blocks of the cluster. A warp then multiplies by one factor, f:

    e = 2^((x - m) * scale),  scale = log2(e) / t        m: the warp's maximum; for t < 0 of -x, with -t
    p = e * f,  f = 2^((m - M) * scale) / L              M, L: the row's maximum and sum

So logits are read once, an element has one exponential, and blocks wait for each other once. The launch guarantees that
the blocks of a cluster run at the same time, so waiting is safe.
"""

import functools
from dataclasses import dataclass, field, fields
from struct import pack
from typing import Any, NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32, const_expr

from kda_runtime.cubin import Address, Bindable, CubinLaunch
from kda_runtime.cute_compile import cute_cubin
from kda_runtime.launch import Binary, Chain, Run

from .plans import TILES, VECTOR, Config

WARP = 32
LOG2_E = 1.4426950408889634
LARGEST = 3.4028234663852886e38
"""Largest finite float32."""
RESIDENT_WARPS = ((4, 48), (10, 32), (14, 24), (TILES, 16))
"""(most tiles, warps on a multiprocessor); these leave a thread 40, 64, 80 and 128 registers."""
DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16, torch.float32: Float32, None: None}


class Numbers(NamedTuple):
    """A call's sizes, as the kernel gets them."""

    vectors: Int32
    """Vectors of a row, four elements each."""
    share: Int32
    """Vectors of a block."""
    row_bytes: Int32
    """Bytes from one row of logits to the next."""
    temperature_stride: Int32
    """In elements."""


@dataclass(frozen=True)
class Cut:
    """Constants of the kernel."""

    dtype: Any
    temperature_dtype: Any
    """None without temperatures."""
    blocks: int
    warps: int
    tiles: int
    """Vectors of a thread."""
    store: str
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def words(self) -> int:
        """32-bit words of a vector of logits."""
        return VECTOR * self.dtype.width // 32


@cute.kernel
def softmax_cluster_kernel(addresses: tuple, numbers: Numbers, cut: cutlass.Constexpr):
    """One cluster: a row, from logits to p."""
    blocks, threads, vectors = cut.blocks, cut.threads, numbers.vectors
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    row = Int64(block // blocks)
    first = rank * numbers.share + thread  # the first vector of this thread; the next are `threads` apart
    left = cutlass.min(numbers.share, vectors - rank * numbers.share) - thread  # up to the end of the block's share

    smem = cutlass.memory.SmemAllocator()
    sWarps = smem.allocate_tensor(Float32, cute.make_layout((2, cut.warps)))
    sBlocks = smem.allocate_tensor(Float32, cute.make_layout((2, blocks)))
    arrived = smem.allocate_array(Int64)  # an mbarrier

    # A block may write into another's shared memory only when that one has begun and can count arriving bytes.
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, 8 * blocks)
    cute.arch.cluster_arrive_relaxed()
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()

    rX = cute.make_rmem_tensor(cute.make_layout((cut.words, cut.tiles)), Uint32)
    _read(rX, addresses[1] + row * Int64(numbers.row_bytes), first, threads, vectors)
    scale, sign = _scale_and_sign(addresses, numbers, row, cut)

    rE = cute.make_rmem_tensor(cute.make_layout((VECTOR, cut.tiles)), Float32)
    largest, total = _exponentials(rE, rX, cut, left, scale, sign)

    warp = cute.arch.warp_idx()  # a shuffle, which needs all lanes
    if cute.arch.lane_idx() == 0:
        sWarps[0, warp], sWarps[1, warp] = largest, total
    cute.arch.sync_threads()
    of_block, sum_of_block = _combine(sWarps, cut.warps, scale)

    cute.arch.cluster_wait()
    if thread < blocks:  # to every block, this one included
        cute.arch.store_async_dsmem(sBlocks.iterator + 2 * rank, of_block.bitcast(Int32), arrived, thread)
        cute.arch.store_async_dsmem(sBlocks.iterator + 2 * rank + 1, sum_of_block.bitcast(Int32), arrived, thread)
    cute.arch.mbarrier_wait(arrived, 0)
    of_row, sum_of_row = _combine(sBlocks, blocks, scale)
    factor = _power((largest - of_row) * scale) / sum_of_row

    _write(rE, factor, addresses[0] + 4 * VECTOR * (row * Int64(vectors) + Int64(first)), left, cut)


def _read(rX, line, first, stride, vectors):
    """A thread's vectors of a row, `stride` apart; beyond the row's end its last vector is loaded again.

    Without a branch no load has to wait for another.
    """
    words = cute.size(rX, mode=[0])
    for tile in range(cute.size(rX, mode=[1])):
        at = cutlass.min(first + tile * stride, vectors - 1)
        cute.autovec_copy(_words_at(line + 4 * words * Int64(at), words), rX[None, tile])


def _exponentials(rE, rX, cut, left, scale, sign):
    """Fill rE with exponentials relative to the warp's maximum; return that and the warp's sum, both up to `left`."""
    largest, total = -Float32.inf, Float32(0.0)
    for tile in range(cut.tiles):
        x = [_element(rX, cut.dtype, i, tile) * sign for i in range(VECTOR)]
        for i in range(VECTOR):
            rE[i, tile] = x[i]
        one = _greater(_greater(x[0], x[1]), _greater(x[2], x[3]))
        largest = cutlass.select_(tile * cut.threads < left, _greater(largest, one), largest)
    largest = cute.arch.warp_reduction_max(largest, op=_greater)
    base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
    for tile in range(cut.tiles):
        e = [_power((rE[i, tile] - base) * scale) for i in range(VECTOR)]
        for i in range(VECTOR):
            rE[i, tile] = e[i]
        total += cutlass.select_(tile * cut.threads < left, (e[0] + e[1]) + (e[2] + e[3]), Float32(0.0))
    return largest, cute.arch.warp_reduction_sum(total)


@cute.jit
def _write(rE, factor, to_own, left, cut: cutlass.Constexpr):
    """Store a thread's vectors, times `factor`, up to `left`."""
    for tile in cutlass.range_constexpr(cut.tiles):
        if tile * cut.threads < left:
            made = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            for i in cutlass.range_constexpr(VECTOR):
                made[i] = rE[i, tile] * factor
            words, to = cute.recast_tensor(made, Uint32), to_own + 4 * VECTOR * tile * cut.threads
            if const_expr(cut.store == ".cs"):
                cute.arch.store(_pointer(Uint32, to, 16), words.load().ir_value(), cop="cs")
            else:
                cute.autovec_copy(words, _words_at(to, VECTOR))


def _pointer(dtype, address, align):
    """A pointer into global memory."""
    return cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)


def _words_at(address, words):
    """The words of a vector at an address."""
    return cute.make_tensor(_pointer(Uint32, address, 4 * words), cute.make_layout(words))


def _element(rX, dtype, i, tile):
    """Element i of a vector as float32: one instruction, which extracting 16 bits and converting them is not."""
    if dtype is Float32:
        return rX[i, tile].bitcast(Float32)
    word, upper = rX[i // 2, tile], i % 2
    if dtype is BFloat16:
        return (word & Uint32(0xFFFF0000) if upper else word << Uint32(16)).bitcast(Float32)
    return Uint16(word >> Uint32(16) if upper else word).bitcast(Float16).to(Float32)


def _greater(a, b):
    """The greater of two; of a NaN and a number, the number."""
    return cute.arch.fmax(a, b)


def _power(exponent):
    """Two to that power, by the hardware's approximation."""
    return cute.math.exp2(exponent, fastmath=True)


@cute.jit
def _scale_and_sign(addresses: tuple, numbers: Numbers, row, cut: cutlass.Constexpr):
    """A positive factor for distances and a sign for logits; without temperatures t is 1."""
    scale, sign = Float32(LOG2_E), Float32(1.0)
    if const_expr(cut.temperature_dtype is not None):
        width = cut.temperature_dtype.width // 8
        at = addresses[2] + width * (row * Int64(numbers.temperature_stride))
        own = cute.make_tensor(_pointer(cut.temperature_dtype, at, width), cute.make_layout(1))
        t = own[0].to(Float32)
        sign = cutlass.select_(t < 0.0, Float32(-1.0), Float32(1.0))
        scale = cute.arch.fmin(LOG2_E / (t * sign), LARGEST, nan=True)
        scale = cutlass.select_(t == 0.0, Float32.nan, scale)
    return scale, sign


@cute.jit
def _combine(pairs, count: cutlass.Constexpr, scale):
    """Combine `count` pairs of maximum and sum, a power of two: a lane takes one pair, every lane gets the result."""
    i = cute.arch.lane_idx() % count
    one, total = pairs[0, i], pairs[1, i]
    largest = cute.arch.warp_reduction_max(one, op=_greater, threads_in_group=count)
    weighted = total * _power((one - largest) * scale)
    # A part without elements, or with only -inf, does not count.
    weighted = cutlass.select_(total == 0.0, Float32(0.0), weighted)
    return largest, cute.arch.warp_reduction_sum(weighted, threads_in_group=count)


def shared_bytes(blocks: int, warps: int) -> int:
    """Bytes of a block: two numbers for every warp and every block, and an mbarrier."""
    return 8 * (blocks + warps + 1)


@cute.jit
def launch(addresses: tuple, numbers: tuple, constants: cutlass.Constexpr, blocks: Int32, stream: driver.CUstream):
    """Launch `blocks` blocks, a cluster for each row."""
    cut = Cut(*constants)
    softmax_cluster_kernel(addresses, Numbers(*numbers), cut).launch(
        grid=[blocks, 1, 1],
        block=[cut.threads, 1, 1],
        cluster=[cut.blocks, 1, 1],
        smem=shared_bytes(cut.blocks, cut.warps),
        stream=stream,
        use_pdl=cut.pdl,
        min_blocks_per_mp=max(next(held for most, held in RESIDENT_WARPS if cut.tiles <= most) // cut.warps, 1),
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class ClusterLaunch(Bindable):
    """One launch of the kernel, on p, logits and temperatures, if any; in the manner of `launch.Launch`."""

    dtypes: tuple[torch.dtype, torch.dtype | None]
    """Of logits and temperatures."""
    config: Config
    tiles: int
    rows: int
    numbers: tuple[int, ...]
    """As `Numbers`."""
    otherwise: Chain = field(compare=False, repr=False)
    """What takes logits or p that are not aligned to a vector."""

    name, function = "softmax_cluster_kernel", staticmethod(launch)

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `function` is compiled with; of the numbers, also that of blocks, only the types matter."""
        addresses, numbers = (Int64(0),) * (2 + (constants[1] is not None)), (Int32(0),) * len(Numbers._fields)
        return addresses, numbers, constants, Int32(0), driver.CUstream(0)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return shared_bytes(self.config.blocks, self.config.warps)

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        addresses = [Address.ALIGNED] * 2 + [Address.ANY] * (self.dtypes[1] is not None)
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(self.rows * self.config.blocks, 1, 1),
            threads=self.config.warps * WARP,
            params=(*addresses, *(pack("<I", number) for number in self.numbers)),
            cluster=self.config.blocks,
            dynamic_shared_bytes=self.shared,
            dependent=self.config.pdl,
            otherwise=self.otherwise.run_at,
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constants, as `Cut`."""
        config = self.config
        dtypes = (DTYPES[dtype] for dtype in self.dtypes)
        return *dtypes, config.blocks, config.warps, self.tiles, config.store, config.pdl

    @property
    def variant(self) -> str:
        """The name of this compilation: all constants, and no numbers."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        named = zip(fields(Cut)[2:], self.constants[2:], strict=True)
        return " ".join([*dtypes, *(f"{constant.name}={value}" for constant, value in named)])

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        return Binary(code(self.constants, target), self.shared)

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one): a function of the addresses."""
        major, minor = torch.cuda.get_device_capability(device)
        return self.with_code(code(self.constants, f"sm_{major}{minor}a")).bind(device)


@functools.cache
def code(constants: tuple[Any, ...], target: str) -> bytes:
    """The kernel for a target; sizes are arguments."""
    return cute_cubin(launch, *ClusterLaunch.arguments(constants), target=target)
