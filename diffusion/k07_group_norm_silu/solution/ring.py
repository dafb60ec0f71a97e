"""GroupNorm with SiLU that reads x once, whatever its size: blocks hold parts of it in shared memory (CuTe DSL).

As many blocks as have room at once share the parts of all groups in turn. A block has a ring of parts: those behind are
on their way from memory, of those ahead the statistics are said, and they wait until all parts of their group have
said theirs. Each thread copies its own vectors and is the only one to read them, so that the ring takes no barrier.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from kda_core.cubin import CubinLaunch

from .dsl import (
    WARP,
    WORDS,
    CuteLaunch,
    affine,
    afresh,
    divisor,
    output,
    pointer,
    quotient,
    ratio,
    scaled,
    squares_of,
    total_of,
    tree,
    words_at,
)
from .tuning import VECTOR_BYTES

ALIGNMENT = 128
"""Of the ring in shared memory."""
AT_ONCE = 256
"""Statistics of a group that a block asks for before it waits for one of them; more cost registers."""
NATURAL = 0x7FFFFFFF
"""All bits of a float but its sign."""


@cute.kernel
def ring_kernel(
    y: Int64,  # address of [total, n]
    x: Int64,  # address of [total, n]
    weight: Int64,  # address of [groups * group_channels]
    bias: Int64,  # address of [groups * group_channels]
    words: Int64,  # address of [total, parts] int64: mean and centred squares of every part, negative before
    vectors: Int32,  # of a group
    channel: Int32,  # vectors of a channel, as many as a part has at least
    by_channel: Int32,  # the same, as `divisor` says
    channel_shift: Int32,
    parts: Int32,  # of a group
    by_parts: Int32,  # the same, as `divisor` says
    parts_shift: Int32,
    total: Int32,  # groups of all batches
    groups: Int32,
    group_channels: Int32,
    patience: Int32,  # so often a thread looks for statistics before its block takes them itself
    eps: Float32,
    dtype: cutlass.Constexpr,
    weight_dtype: cutlass.Constexpr,
    bias_dtype: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    stages: cutlass.Constexpr,  # parts of a ring
    ahead: cutlass.Constexpr,  # of these, parts that are said while the first of them waits
    even: cutlass.Constexpr,  # all parts are full
    store: cutlass.Constexpr,  # cache modifier of the stores
    pdl: cutlass.Constexpr,
):
    """Block b: parts b, b + blocks, ... of all groups, of `tiles` vectors of every thread each.

    Nobody waits for a block that has not begun: a block that has waited too long takes the statistics that are missing
    itself, to the same bits. So the kernel ends however many of its blocks run at a time.
    """
    exact = const_expr(dtype is Float32)
    threads = const_expr(warps * WARP)
    share = const_expr(tiles * threads)
    behind = const_expr(stages - ahead)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    every = total * parts
    steps = (every - block + blocks - 1) // blocks

    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((WORDS, threads, tiles, stages))
    sRing = smem.allocate_tensor(Uint32, layout, byte_alignment=ALIGNMENT)
    halves = cute.make_layout((3, warps, 2))  # used in turn
    sPart, sGroup = smem.allocate_tensor(Float32, halves), smem.allocate_tensor(Float32, halves)
    sMissing = smem.allocate_tensor(Int32, cute.make_layout(1))

    # x is there: the launch ahead lets this one begin when it has itself waited for whatever wrote x.
    copied = x, vectors, parts, by_parts, parts_shift, thread, even
    for stage in cutlass.range_constexpr(behind):
        place = block + stage * blocks
        _prefetch(sRing, place, place < every, stage, *copied)
    if const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    rX = cute.make_rmem_tensor(cute.make_layout((WORDS, tiles)), Uint32)
    looks = patience
    known = Int32(-1)  # the group of which mean and scale are
    mean, scale = Float32(0.0), Float32(0.0)
    near_weight, far_weight = weight_dtype(0.0), weight_dtype(0.0)  # of the two channels that a part may have
    near_bias, far_bias = bias_dtype(0.0), bias_dtype(0.0)
    near, far = (mean, mean), (mean, mean)  # the same, as `affine` says
    group, begin, next_group, next_begin = (Int32(0) for _ in range(4))
    seen = tuple(Int64(0) for _ in range(1 + max(AT_ONCE // threads, 1)))
    said, written, free = Int32(0), Int32(0), Int32(behind % stages)  # stages of the ring
    half, turn = Int32(0), Int32(0)
    for step in cutlass.range(steps + ahead, unroll=1):
        if step < steps:
            cute.arch.cp_async_wait_group(behind - 1)
            cute.autovec_copy(sRing[None, thread, None, said], rX)
            place = block + step * blocks
            start = (place - ratio(place, by_parts, parts_shift) * parts) * share
            _say(rX, words + 8 * Int64(place), dtype, sPart, half, start, vectors, thread, warps, even)
            half = 1 - half
            said = _next(said, stages)
        if step >= ahead:
            group, begin = next_group, next_begin
            if group != known:
                own = words + 8 * Int64(group) * Int64(parts)
                shared = sPart, sGroup, sMissing
                mean, scale, looks, turn = _group(
                    own,
                    seen,
                    group,
                    x,
                    dtype,
                    shared,
                    half,
                    turn,
                    looks,
                    parts,
                    vectors,
                    eps,
                    thread,
                    tiles,
                    warps,
                    even,
                )
                known = group
            near = affine(scaled(near_weight, exact), scaled(near_bias, exact), mean, scale, dtype)
            far = affine(scaled(far_weight, exact), scaled(far_bias, exact), mean, scale, dtype)
            cute.autovec_copy(sRing[None, thread, None, written], rX)
            written = _next(written, stages)
        # Into the stage that has just been read for the last time, or has not been used yet.
        _prefetch(sRing, block + (step + behind) * blocks, step < steps - behind, free, *copied)
        free = _next(free, stages)
        # What the next output needs is on its way while this one is written.
        if (step + 1 >= ahead) & (step + 1 - ahead < steps):
            place = block + (step + 1 - ahead) * blocks
            next_group = ratio(place, by_parts, parts_shift)
            next_begin = (place - next_group * parts) * share
            one = ratio(next_begin, by_channel, channel_shift)
            other = cutlass.min(one + 1, group_channels - 1)
            first_channel = Int32(Uint32(next_group) % Uint32(groups)) * group_channels
            mW = cute.make_tensor(pointer(weight_dtype, weight) + first_channel, cute.make_layout(group_channels))
            mB = cute.make_tensor(pointer(bias_dtype, bias) + first_channel, cute.make_layout(group_channels))
            near_weight, far_weight, near_bias, far_bias = mW[one], mW[other], mB[one], mB[other]
            seen = _look(words + 8 * Int64(next_group) * Int64(parts), Int32(0), parts, thread, threads)
        if step >= ahead:
            to = y + 16 * Int64(group) * Int64(vectors)
            border = (ratio(begin, by_channel, channel_shift) + 1) * channel
            _write(rX, to, dtype, begin + thread, border, near, far, mean, vectors, threads, store, even)


def _next(stage, stages):
    """The stage behind."""
    return cutlass.select_(stage == stages - 1, Int32(0), stage + 1)


def _left(vectors, first, even):
    """Vectors of the group from the first on, or, where all parts are full, so many that the compiler asks no more."""
    return Int32(NATURAL) if even else vectors - first


def _word(address):
    """A part's statistics as they are now, negative before they are said."""
    return cute.arch.load(pointer(Int64, address), Int64, sem="relaxed", scope="gpu")


def _look(words, base, parts, thread, threads):
    """The words of a group's first part, and those of the AT_ONCE parts from `base` on that are this thread's."""
    at = [cutlass.min(base + thread + i * threads, parts - 1) for i in range(max(AT_ONCE // threads, 1))]
    return _word(words), *(_word(words + 8 * Int64(i)) for i in at)


def _any(numbers):
    """A number that is negative if one of them is."""
    return functools.reduce(operator.or_, numbers)


@cute.jit
def _prefetch(
    sRing: cute.Tensor,  # (words, threads, tiles, stages)
    place: Int32,
    exists: cutlass.Boolean,
    stage: Int32,
    x: Int64,
    vectors: Int32,
    parts: Int32,
    by_parts: Int32,
    parts_shift: Int32,
    thread: Int32,
    even: cutlass.Constexpr,
):
    """Set this thread's vectors of a part on their way; an empty group of copies where there is no such part."""
    _, threads, tiles, _ = const_expr(sRing.shape)
    if exists:
        group = ratio(place, by_parts, parts_shift)
        first = (place - group * parts) * (tiles * threads) + thread
        source = x + 16 * (Int64(group) * Int64(vectors) + Int64(first))
        left = _left(vectors, first, even)
        copy = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(copy, Uint32, num_bits_per_copy=8 * VECTOR_BYTES)
        for tile in cutlass.range_constexpr(tiles):
            if tile * threads < left:
                cute.copy(atom, words_at(source + 16 * tile * threads), sRing[None, thread, tile, stage])
    cute.arch.cp_async_commit_group()


@cute.jit
def _read(rX: cute.Tensor, x: Int64, group: Int32, first: Int32, vectors: Int32, threads: cutlass.Constexpr):
    """This thread's vectors of a part, from memory; the group's last vector stands in for what is behind its end."""
    for tile in cutlass.range_constexpr(cute.size(rX, mode=[1])):
        at = cutlass.min(first + tile * threads, vectors - 1)
        cute.autovec_copy(words_at(x + 16 * (Int64(group) * Int64(vectors) + Int64(at))), rX[None, tile])


@cute.jit
def _say(
    rX: cute.Tensor,  # (words, tiles)
    word: Int64,
    dtype: cutlass.Constexpr,
    sPart: cute.Tensor,  # (3, warps, 2)
    half: Int32,
    begin: Int32,
    vectors: Int32,
    thread: Int32,
    warps: cutlass.Constexpr,
    even: cutlass.Constexpr,
):
    """Take a part's mean and centred squares, by one barrier: of a thread, a warp and the block, and say them.

    Sums of a warp are relative to its first thread's mean, sums of the block to its first warp's. So what cancels in
    S2 - S1^2 / n is at most as many times what is left as there are threads, or warps.
    """
    count, mean, squares = moments_of(rX, dtype, _left(vectors, begin + thread, even), warps * WARP)
    warp = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        sPart[0, warp, half], sPart[1, warp, half], sPart[2, warp, half] = count, mean, squares
    cute.arch.sync_threads()
    if warp == 0:
        lane = cute.arch.lane_idx() % warps
        count, mean, squares = sPart[0, lane, half], sPart[1, lane, half], sPart[2, lane, half]
        _, mean, squares = merged(count, mean, squares, sPart[1, 0, half], warps)
        if thread == 0:
            low = Int64(Uint32(mean.bitcast(Int32)))
            high = Int64(squares.bitcast(Int32) & NATURAL)  # a NaN may have a sign
            cute.arch.store(pointer(Int64, word), high << 32 | low, sem="relaxed", scope="gpu")


@cute.jit
def _combined(
    words: Int64,
    seen: tuple,  # as `_look` has them
    dtype: cutlass.Constexpr,
    sGroup: cute.Tensor,  # (3, warps, 2)
    half: Int32,
    looks: Int32,
    parts: Int32,
    vectors: Int32,
    eps: Float32,
    thread: Int32,
    share: cutlass.Constexpr,
    warps: cutlass.Constexpr,
) -> tuple[Float32, Float32, Int32]:
    """Of a group: mean and inverse deviation from the words of its parts, and a negative number if one is not there.

    Sums are relative to the mean of the first part, which is in them: what cancels is at most as many times what is
    left as there are parts.
    """
    vector = const_expr(128 // dtype.width)
    threads = const_expr(warps * WARP)
    moved, squares, least = Float32(0.0), Float32(0.0), Int32(0)
    many = const_expr(len(seen) - 1)
    for base in cutlass.range(0, parts, many * threads, unroll=1):
        if base > 0:
            seen = _look(words, base, parts, thread, threads)
        left = looks
        while (_any(seen) < 0) & (left > 1):
            seen = _look(words, base, parts, thread, threads)
            left -= 1
        common = Int32(seen[0]).bitcast(Float32)
        for i in cutlass.range_constexpr(many):
            part, word = base + thread + i * threads, seen[1 + i]
            held = Float32(cutlass.min(vectors - part * share, share) * vector)
            count = cutlass.select_(part < parts, held, Float32(0.0))
            apart = cutlass.select_(part < parts, Int32(word).bitcast(Float32) - common, Float32(0.0))
            spread = cutlass.select_(part < parts, Int32(word >> 32).bitcast(Float32), Float32(0.0))
            moved += count * apart
            squares += spread + count * apart * apart
        least |= Int32(_any(seen) >> 32)
    moved, squares = cute.arch.warp_reduction_sum(moved), cute.arch.warp_reduction_sum(squares)
    least = cute.arch.warp_redux_sync(least, kind="min")
    warp = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        sGroup[0, warp, half], sGroup[1, warp, half], sGroup[2, warp, half] = moved, squares, least.bitcast(Float32)
    cute.arch.sync_threads()
    moved, squares = [tree([sGroup[i, warp, half] for warp in range(warps)]) for i in range(2)]
    for i in cutlass.range_constexpr(warps):
        least |= sGroup[2, i, half].bitcast(Int32)
    length = Float32(vectors * vector)
    shift = quotient(moved, length)
    variance = cute.arch.fmax(quotient(squares - moved * shift, length), Float32(0.0), nan=True)
    return Int32(seen[0]).bitcast(Float32) + shift, cute.math.rsqrt(variance + eps), least


@cute.jit
def _group(
    words: Int64,
    seen: tuple,  # as `_look` has them
    group: Int32,
    x: Int64,
    dtype: cutlass.Constexpr,
    shared: tuple,
    half: Int32,
    turn: Int32,
    looks: Int32,
    parts: Int32,
    vectors: Int32,
    eps: Float32,
    thread: Int32,
    tiles: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    even: cutlass.Constexpr,
) -> tuple[Float32, Float32, Int32, Int32]:
    """Mean and inverse deviation of a group, how often to look next time, and the half of sGroup to use then.

    Where a part's statistics are not there after so many looks, this block takes them. From then on it looks once.
    """
    sPart, sGroup, sMissing = shared
    threads = const_expr(warps * WARP)
    share = const_expr(tiles * threads)
    numbers = parts, vectors, eps, thread, share, warps
    mean, scale, least = _combined(words, seen, dtype, sGroup, turn, looks, *numbers)
    turn = 1 - turn
    while least < 0:
        looks = Int32(1)
        rX = cute.make_rmem_tensor(cute.make_layout((WORDS, tiles)), Uint32)
        for part in cutlass.range(parts, unroll=1):
            if thread == 0:
                sMissing[0] = Int32(_word(words + 8 * Int64(part)) >> 32)
            cute.arch.sync_threads()
            there = sMissing[0]
            cute.arch.sync_threads()
            if there < 0:
                begin = part * share
                _read(rX, x, group, begin + thread, vectors, threads)
                _say(rX, words + 8 * Int64(part), dtype, sPart, half, begin, vectors, thread, warps, even)
        seen = _look(words, Int32(0), parts, thread, threads)
        mean, scale, least = _combined(words, seen, dtype, sGroup, turn, looks, *numbers)
        turn = 1 - turn
    return mean, scale, looks, turn


@cute.jit
def _write(
    rX: cute.Tensor,  # (words, tiles)
    y: Int64,  # the group's address
    dtype: cutlass.Constexpr,
    first: Int32,
    border: Int32,  # where the second channel begins
    near: tuple,
    far: tuple,
    mean: Float32,
    vectors: Int32,
    threads: cutlass.Constexpr,
    store: cutlass.Constexpr,
    even: cutlass.Constexpr,
):
    """The output of this thread's vectors of a part, which has elements of two channels at most."""
    rY = cute.make_rmem_tensor(cute.make_layout(WORDS * 32 // dtype.width), dtype)
    left = _left(vectors, first, even)
    y = y + 16 * Int64(first)
    for tile in cutlass.range_constexpr(cute.size(rX, mode=[1])):
        if tile * threads < left:
            is_near = first + tile * threads < border
            slope = cutlass.select_(is_near, near[0], far[0])
            shift = cutlass.select_(is_near, near[1], far[1])
            values = output(rX, dtype, tile, mean, slope, shift)
            for i in cutlass.range_constexpr(len(values)):
                rY[i] = values[i].to(dtype)
            to = y + 16 * tile * threads
            if const_expr(store == ".cs"):
                vector = cute.recast_tensor(rY, Uint32).load().ir_value()
                cute.arch.store(pointer(Uint32, to, VECTOR_BYTES), vector, cop="cs")
            else:
                cute.autovec_copy(cute.recast_tensor(rY, Uint32), words_at(to))


def shared_bytes(warps, tiles, stages):
    """Of a block: the ring, three numbers of every warp twice in turn for parts and for groups, and one more."""
    return tiles * warps * WARP * VECTOR_BYTES * stages + 4 * (2 * 6 * warps + 1)


@cute.jit
def launch(
    y: Int64,
    x: Int64,
    weight: Int64,
    bias: Int64,
    words: Int64,
    vectors: Int32,
    channel: Int32,
    by_channel: Int32,
    channel_shift: Int32,
    parts: Int32,
    by_parts: Int32,
    parts_shift: Int32,
    total: Int32,
    groups: Int32,
    group_channels: Int32,
    patience: Int32,
    eps: Float32,
    blocks: Int32,
    dtype: cutlass.Constexpr,
    weight_dtype: cutlass.Constexpr,
    bias_dtype: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    resident: cutlass.Constexpr,
    even: cutlass.Constexpr,
    store: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
    stream: driver.CUstream,
):
    """So many blocks."""
    addresses, divisors = (
        (y, x, weight, bias, words),
        (channel, by_channel, channel_shift, parts, by_parts, parts_shift),
    )
    numbers = (vectors, *divisors, total, groups, group_channels, patience, eps)
    dtypes, cuts = (dtype, weight_dtype, bias_dtype), (warps, tiles, stages, ahead, even, store, pdl)
    ring_kernel(*addresses, *numbers, *dtypes, *cuts).launch(
        grid=[blocks, 1, 1],
        block=[warps * WARP, 1, 1],
        smem=shared_bytes(warps, tiles, stages),
        stream=stream,
        use_pdl=pdl,
        min_blocks_per_mp=resident // warps,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class RingLaunch(CuteLaunch):
    """One launch of the kernel: its tensors are y, x, weight, bias and the words. A channel has a part's elements."""

    blocks: int
    stages: int
    """Parts of a block's ring."""
    ahead: int
    """Of these, parts whose statistics are said before the first of them is written: 1 to `stages` - 1."""
    resident: int
    """Warps that have room on a multiprocessor."""
    store: str
    """Cache modifier of the stores: none or `.cs`."""
    patience: int

    name = "ring_kernel"
    function = staticmethod(launch)

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `launch` is compiled with."""
        return *[Int64(0)] * 5, *[Int32(0)] * 11, Float32(0.0), Int32(0), *constants, driver.CUstream(0)

    @property
    def cuts(self) -> dict[str, Any]:
        """The kernel's constant parameters behind the dtypes."""
        names = "warps", "tiles", "stages", "ahead", "resident", "even", "store", "pdl"
        return {name: getattr(self, name) for name in names}

    @property
    def even(self) -> bool:
        """Whether all parts are full."""
        return self.sizes[0] * self.dtypes[0].itemsize % (self.tiles * self.warps * WARP * VECTOR_BYTES) == 0

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        elements, channel, total, groups, group_channels = self.sizes
        vector = VECTOR_BYTES // self.dtypes[0].itemsize
        vectors, channel = elements // vector, channel // vector
        parts = -(-vectors // (self.tiles * self.warps * WARP))
        divisors = channel, *divisor(channel), parts, *divisor(parts)
        numbers = (vectors, *divisors, total, groups, group_channels, self.patience)
        shared = shared_bytes(self.warps, self.tiles, self.stages)
        return self.described(cubin, self.blocks, 1, numbers, shared)
