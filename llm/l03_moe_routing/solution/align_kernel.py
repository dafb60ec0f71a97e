"""The alignment in one launch of a block, or of a cluster of blocks that exchange their counts. A CuTe DSL kernel.

Every thread holds some pairs and counts them in shared memory; the old value of a counter is the pair's rank among its
block's pairs of that expert. In a cluster each block then writes its counts into the shared memory of all blocks. So
one exchange is enough: every block sums and scans all counts itself. The launch guarantees that the blocks of a cluster
run at the same time, so waiting for each other is safe. Nothing passes through global memory.

Several clusters may each count all pairs, and know nothing of each other: each places only the pairs of its share of
the buckets. Writing pairs to scattered places takes a multiprocessor a cycle or more for each.
"""

import functools
from dataclasses import dataclass, replace
from struct import pack
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Int32, Int64, Uint32, Uint64, const_expr

from kda_runtime.cubin import PORTABLE_BLOCKS, Address, Bindable, CubinLaunch
from kda_runtime.cute_compile import cute_cubin
from kda_runtime.launch import Binary, Run

WARP = 32
IDS = {torch.int32: Int32, torch.int64: Int64}


class Numbers(NamedTuple):
    """A call's sizes, as the kernel gets them."""

    pairs: Int32
    """Pairs of a token and an expert."""
    places: Int32
    """Elements of `sorted_token_ids`."""
    tiles: Int32
    """Elements of `expert_ids`."""


@dataclass(frozen=True)
class Cut:
    """Constants of the kernel."""

    id_type: Any
    """Type of the elements of `topk_ids`."""
    buckets: int
    """One per expert, and one before them for the id -1."""
    tile: int
    """`block_size`: the places of an expert are padded to whole tiles of so many."""
    pad: bool
    """Whether places without a pair are written."""
    pad_tiles: bool
    """Whether tiles without an expert are written."""
    count_idle: bool
    """Whether the number of tiles of bucket 0 is written, behind the number of places."""
    map_outside: bool
    """Whether ids outside the range go to bucket 0."""
    items: int
    """Pairs of a thread."""
    warps: int
    """Warps of a block."""
    blocks: int
    """Blocks of a cluster."""
    clusters: int
    """A power of two; each places the pairs of every so many-th bucket."""
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def held(self) -> int:
        """Buckets that a thread scans."""
        return -(-self.buckets // self.threads)

    @property
    def shared_bytes(self) -> int:
        """Counts, first places, used places, a sum of each warp, the counts of all blocks, an mbarrier."""
        return 4 * (3 * self.buckets + WARP + (self.blocks * self.buckets if self.blocks > 1 else 0)) + 16


def _at(dtype, address):
    """A pointer to an address in global memory."""
    return cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)


def _read(pointer):
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _write(pointer, value):
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


def _bucket(identity, cut):
    """The bucket of an expert's id."""
    if cut.map_outside:
        unsigned = Uint64 if cut.id_type is Int64 else Uint32
        shifted = unsigned(identity) + unsigned(1)
        return cutlass.select_(shifted < unsigned(cut.buckets), Int32(shifted), Int32(0))
    return Int32(identity) + 1


def _up(number, tile):
    """The next multiple of the tile."""
    return (number + (tile - 1)) // tile * tile


@cute.kernel
def align_kernel(addresses: tuple, numbers: Numbers, cut: cutlass.Constexpr):  # noqa: C901  constants decide
    """One cluster: all pairs are counted, those of its own buckets are placed."""
    places, tiles, total_out, ids = addresses
    mPlace, mTile, mTotal, mId = _at(Int32, places), _at(Int32, tiles), _at(Int32, total_out), _at(cut.id_type, ids)
    buckets, tile, threads, pairs = cut.buckets, cut.tile, cut.threads, numbers.pairs
    thread, _, _ = cute.arch.thread_idx()
    rank = Int32(0)
    if const_expr(cut.blocks > 1):
        rank = cute.arch.block_idx_in_cluster()
    cluster = Int32(0)
    if const_expr(cut.clusters > 1):
        cluster = cute.arch.block_idx()[0] // cut.blocks

    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(Int64)  # an mbarrier
    sCount = smem.allocate_tensor(Int32, cute.make_layout(buckets))
    sStart = smem.allocate_tensor(Int32, cute.make_layout(buckets))
    sUsed = smem.allocate_tensor(Int32, cute.make_layout(buckets))
    sWarp = smem.allocate_tensor(Int32, cute.make_layout(WARP))
    sAll = smem.allocate_tensor(Int32, cute.make_layout(buckets * cut.blocks if cut.blocks > 1 else 1))

    for b in cutlass.range(thread, buckets, threads, unroll=1):
        sCount[b] = 0
    if thread < WARP:
        sWarp[thread] = 0
    if const_expr(cut.blocks > 1):
        # A block may write into another only when that one has begun and its mbarrier can count arriving bytes.
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, 4 * buckets * cut.blocks)
        cute.arch.cluster_arrive_relaxed()
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()

    first = rank * (cut.items * threads) + thread
    rBucket = cute.make_rmem_tensor(cute.make_layout(cut.items), Int32)
    rRank = cute.make_rmem_tensor(cute.make_layout(cut.items), Int32)
    for i in cutlass.range_constexpr(cut.items):
        # Beyond the last pair that pair is loaded again: without a branch no load has to wait for another.
        rBucket[i] = _bucket(_read(mId + cutlass.min(first + i * threads, pairs - 1)), cut)
    if const_expr(cut.pad and cut.blocks * cut.clusters == 1):
        # Padding is written while the ids load. The barriers below order it before the pairs that overwrite it.
        _fill(mPlace, thread, numbers.places, threads, pairs)
    cute.arch.sync_threads()

    for i in cutlass.range_constexpr(cut.items):
        if first + i * threads < pairs:
            rRank[i] = cute.arch.atomic_add(sCount.iterator + rBucket[i], Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()

    # Every thread scans some buckets that are next to each other.
    rBefore = cute.make_rmem_tensor(cute.make_layout(cut.held), Int32)
    rTotal = cute.make_rmem_tensor(cute.make_layout(cut.held), Int32)
    if const_expr(cut.blocks > 1):
        _exchange(sCount, sAll, arrived, rank, cut)
        padded = _counted(sAll, rank, rBefore, rTotal, cut)
    else:
        padded = _counted(sCount, rank, rBefore, rTotal, cut)
    start, total = _scanned(padded, sWarp)
    everyone = (cluster * cut.blocks + rank) * threads + thread
    if everyone == 0:
        _write(mTotal, total)
        if const_expr(cut.count_idle):
            _write(mTotal + 1, _up(rTotal[0], tile) // tile)
    for i in cutlass.range_constexpr(cut.held):
        b = thread * cut.held + i
        if b < buckets:
            sStart[b] = start + rBefore[i]
            sUsed[b] = start + rTotal[i]
        start += _up(rTotal[i], tile)
    cute.arch.sync_threads()

    for i in cutlass.range_constexpr(cut.items):
        own = first + i * threads < pairs
        if const_expr(cut.clusters > 1):
            own = own and rBucket[i] % cut.clusters == cluster
        if own:
            place = sStart[rBucket[i]] + rRank[i]
            _write(mPlace + place, first + i * threads)
            if place % tile == 0:  # the first pair of a tile; every used tile has one
                _write(mTile + place // tile, rBucket[i] - 1)
    step = cut.clusters * cut.blocks * threads
    if const_expr(cut.pad and cut.blocks * cut.clusters > 1):
        for b in cutlass.range(everyone // WARP, buckets, step // WARP, unroll=1):
            _fill(mPlace, sUsed[b] + cute.arch.lane_idx(), _up(sUsed[b], tile), WARP, pairs)
        _fill(mPlace, total + everyone, numbers.places, step, pairs)
    if const_expr(cut.pad_tiles):
        _fill(mTile, total // tile + everyone, numbers.tiles, step, Int32(-1))


@cute.jit
def _fill(mOut, first, behind, step, value):
    """Write the value to every `step`-th place from `first` on, up to `behind`."""
    for place in cutlass.range(first, behind, step, unroll=4):
        _write(mOut + place, value)


@cute.jit
def _exchange(sCount, sAll, arrived, rank, cut: cutlass.Constexpr):
    """Write a block's counts into the shared memory of every block, this one included: a warp for each block."""
    cute.arch.cluster_wait()
    warp = cute.arch.warp_idx()
    if warp < cut.blocks:
        for b in cutlass.range(cute.arch.lane_idx(), cut.buckets, WARP, unroll=1):
            cute.arch.store_async_dsmem(sAll.iterator + (rank * cut.buckets + b), sCount[b], arrived, warp)
    cute.arch.mbarrier_wait(arrived, 0)


@cute.jit
def _counted(sAll, rank, rBefore, rTotal, cut: cutlass.Constexpr):
    """Pairs of a thread's buckets, in the blocks before this one and in all; returns the sum of all, in whole tiles."""
    thread, _, _ = cute.arch.thread_idx()
    padded = Int32(0)
    for i in cutlass.range_constexpr(cut.held):
        b = thread * cut.held + i
        rBefore[i], rTotal[i] = Int32(0), Int32(0)
        if b < cut.buckets:
            for j in cutlass.range_constexpr(cut.blocks):
                count = sAll[j * cut.buckets + b]
                rTotal[i] = rTotal[i] + count
                rBefore[i] = rBefore[i] + cutlass.select_(j < rank, count, Int32(0))
        padded += _up(rTotal[i], cut.tile)
    return padded


@cute.jit
def _scanned(own, sWarp):
    """The sums of `own` over the threads before this one and over all; sWarp is 0 for warps that do not exist."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    upto = own
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
        upto += cutlass.select_(lane >= 1 << i, below, Int32(0))
    if lane == WARP - 1:
        sWarp[warp] = upto
    cute.arch.sync_threads()
    sums = sWarp[lane]
    before = cute.arch.warp_redux_sync(cutlass.select_(lane < warp, sums, Int32(0)), "add")
    return upto - own + before, cute.arch.warp_redux_sync(sums, "add")


@cute.jit
def launch(addresses: tuple, numbers: tuple, constants: cutlass.Constexpr, stream: driver.CUstream):
    """All clusters."""
    cut = Cut(*constants)
    align_kernel(addresses, Numbers(*numbers), cut).launch(
        grid=[cut.clusters * cut.blocks, 1, 1],
        block=[cut.threads, 1, 1],
        cluster=[cut.blocks, 1, 1] if cut.blocks > 1 else None,
        smem=cut.shared_bytes,
        stream=stream,
        use_pdl=cut.pdl,
        min_blocks_per_mp=1,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class AlignLaunch(Bindable):
    """One launch of the kernel, in the manner of `kda_runtime.launch.Launch`.

    Its tensors are sorted_token_ids, expert_ids, num_tokens_post_pad and topk_ids.
    """

    id_dtype: torch.dtype
    cut: tuple[Any, ...]
    """Fields of `Cut` after the first."""
    numbers: tuple[int, int, int]
    """See `Numbers`."""

    name: ClassVar[str] = "align_kernel"
    function: ClassVar[Any] = staticmethod(launch)

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `function` is compiled with; of the numbers only the types matter."""
        return (Int64(0),) * 4, (Int32(0),) * 3, constants, driver.CUstream(0)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constants."""
        return IDS[self.id_dtype], *self.cut

    @property
    def variant(self) -> str:
        """The name of this compilation: all constants, and no numbers."""
        named = zip(list(Cut.__dataclass_fields__)[1:], self.cut, strict=True)
        return " ".join([str(self.id_dtype).removeprefix("torch."), *(f"{name}={value}" for name, value in named)])

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        cut = Cut(*self.constants)
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(cut.clusters * cut.blocks, 1, 1),
            threads=cut.threads,
            params=(*[Address.ANY] * 4, *(pack("<i", number) for number in self.numbers)),
            cluster=cut.blocks,
            dynamic_shared_bytes=cut.shared_bytes,
            dependent=cut.pdl,
            otherwise=self.narrow().run_at if cut.blocks > PORTABLE_BLOCKS else None,
        )

    def narrow(self) -> "AlignLaunch":
        """The same in a cluster that every device with clusters can hold: fewer blocks, of more pairs a thread."""
        cut = Cut(*self.constants)
        items = -(-cut.items * cut.blocks // PORTABLE_BLOCKS)
        fewer = replace(cut, blocks=PORTABLE_BLOCKS, items=items)
        return replace(self, cut=tuple(vars(fewer).values())[1:])

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        return Binary(code(self.constants, target), Cut(*self.constants).shared_bytes)

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one): a function of the addresses."""
        major, minor = torch.cuda.get_device_capability(device)
        return self.with_code(code(self.constants, f"sm_{major}{minor}a")).bind(device)


@functools.cache
def code(constants: tuple[Any, ...], target: str) -> bytes:
    """The kernel for a target; numbers are arguments."""
    return cute_cubin(launch, *AlignLaunch.arguments(constants), target=target)
