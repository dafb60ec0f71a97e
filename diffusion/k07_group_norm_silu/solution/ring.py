"""GroupNorm with SiLU that reads x once, whatever its size: blocks hold parts of it in shared memory (CuTe DSL).

As many blocks as have room at once share the parts of all groups in turn. Each block keeps a ring of parts in shared
memory: the newest are still loading, the older ones have published their statistics and wait for the rest of their
group. Each thread copies its own vectors and is the only one to read them, so the ring needs no barrier.
"""

import functools
import operator
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from kda_runtime.triton_rows import VECTOR_BYTES

from . import dsl

ALIGNMENT = 128
"""Bytes: alignment of the ring in shared memory."""
AT_ONCE = 256
"""Statistics of a group that a block loads before it waits for one of them; more cost registers."""
NATURAL = 0x7FFFFFFF
"""All bits of a float but its sign."""


class Numbers(NamedTuple):
    """A call's sizes, as the kernel gets them."""

    vectors: Int32
    """Vectors of a group."""
    channel: Int32
    """Vectors of a channel, as many as a part has at least."""
    by_channel: Int32
    """Factor of `dsl.divisor` for `channel`; the next field is its shift."""
    channel_shift: Int32
    parts: Int32
    """Parts of a group."""
    by_parts: Int32
    """Factor of `dsl.divisor` for `parts`; the next field is its shift."""
    parts_shift: Int32
    total: Int32
    """Groups of all batches."""
    groups: Int32
    group_channels: Int32
    patience: Int32
    """How often a thread looks for statistics before its block computes them itself."""


@dataclass(frozen=True)
class Cut(dsl.Cut):
    """Constants of the kernel. A block has `share` vectors of a part."""

    stages: int
    ahead: int
    resident: int
    store: str
    even: bool
    """All parts are full."""


@cute.kernel
def ring_kernel(addresses: tuple, numbers: Numbers, eps: Float32, cut: cutlass.Constexpr):
    """Block b: parts b, b + blocks, ... of all groups. A part is `tiles` vectors of every thread.

    From x to y of [total, n], with weight and bias of [groups * group_channels]. `words`, [total, parts] int64, are
    mean and centred squares of every part, negative until they are published.

    A block that has waited too long computes the missing statistics itself, with the same bits. So the kernel ends
    however few of its blocks run at a time.
    """
    y, x, weight, bias, words = addresses
    dtype, threads, share, vectors, parts = cut.dtype, cut.threads, cut.share, numbers.vectors, numbers.parts
    ahead, behind = cut.ahead, cut.stages - cut.ahead
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    every = numbers.total * parts
    steps = (every - block + blocks - 1) // blocks

    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((dsl.WORDS, threads, cut.tiles, cut.stages))
    sRing = smem.allocate_tensor(Uint32, layout, byte_alignment=ALIGNMENT)
    halves = cute.make_layout((3, cut.warps, 2))  # used in turn
    sPart, sGroup = smem.allocate_tensor(Float32, halves), smem.allocate_tensor(Float32, halves)
    shared = sPart, sGroup, smem.allocate_tensor(Int32, cute.make_layout(1))

    # x is complete: the previous launch lets this one begin after it has itself waited for whatever wrote x.
    for stage in cutlass.range_constexpr(behind):
        place = block + stage * blocks
        _prefetch(sRing, place, place < every, stage, x, thread, numbers, cut)
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()

    rX = cute.make_rmem_tensor(cute.make_layout((dsl.WORDS, cut.tiles)), Uint32)
    looks = numbers.patience
    known = Int32(-1)  # the group that mean and scale belong to
    mean, scale = Float32(0.0), Float32(0.0)
    near_weight, far_weight = cut.weight_dtype(0.0), cut.weight_dtype(0.0)  # of the two channels that a part may have
    near_bias, far_bias = cut.bias_dtype(0.0), cut.bias_dtype(0.0)
    near, far = (mean, mean), (mean, mean)  # their factor and offset, from `dsl.affine`
    group, begin, next_group, next_begin = (Int32(0) for _ in range(4))
    seen = tuple(Int64(0) for _ in range(1 + max(AT_ONCE // threads, 1)))
    read, written, free = Int32(0), Int32(0), Int32(behind % cut.stages)  # stages to read, to write out, to load
    half, turn = Int32(0), Int32(0)
    for step in cutlass.range(steps + ahead, unroll=1):
        if step < steps:
            cute.arch.cp_async_wait_group(behind - 1)
            cute.autovec_copy(sRing[None, thread, None, read], rX)
            place = block + step * blocks
            _, part = _part_at(place, numbers)
            _publish(rX, words + 8 * Int64(place), sPart, half, part * share, vectors, thread, cut)
            half = 1 - half
            read = _next(read, cut.stages)
        if step >= ahead:
            group, begin = next_group, next_begin
            if group != known:
                own = words + 8 * Int64(group) * Int64(parts)
                mean, scale, looks, turn = _group(
                    own, seen, group, x, shared, half, turn, looks, eps, thread, numbers, cut
                )
                known = group
            near = dsl.affine(dsl.scaled(near_weight, dtype), dsl.scaled(near_bias, dtype), mean, scale, dtype)
            far = dsl.affine(dsl.scaled(far_weight, dtype), dsl.scaled(far_bias, dtype), mean, scale, dtype)
            cute.autovec_copy(sRing[None, thread, None, written], rX)
            written = _next(written, cut.stages)
        # Into the stage that has just been read for the last time, or has not been used yet.
        _prefetch(sRing, block + (step + behind) * blocks, step < steps - behind, free, x, thread, numbers, cut)
        free = _next(free, cut.stages)
        # Load what the next output needs while this one is written.
        if (step + 1 >= ahead) & (step + 1 - ahead < steps):
            next_group, part = _part_at(block + (step + 1 - ahead) * blocks, numbers)
            next_begin = part * share
            one = dsl.ratio(next_begin, numbers.by_channel, numbers.channel_shift)
            other = cutlass.min(one + 1, numbers.group_channels - 1)
            mW = dsl.channels_of(next_group, cut.weight_dtype, weight, numbers)
            mB = dsl.channels_of(next_group, cut.bias_dtype, bias, numbers)
            near_weight, far_weight, near_bias, far_bias = mW[one], mW[other], mB[one], mB[other]
            seen = _look(words + 8 * Int64(next_group) * Int64(parts), Int32(0), parts, thread, threads)
        if step >= ahead:
            to = y + 16 * Int64(group) * Int64(vectors)
            border = (dsl.ratio(begin, numbers.by_channel, numbers.channel_shift) + 1) * numbers.channel
            _write(rX, to, begin + thread, border, near, far, mean, vectors, cut)


def _next(stage, stages):
    """The next stage of the ring."""
    return cutlass.select_(stage == stages - 1, Int32(0), stage + 1)


def _part_at(place, numbers):
    """The group of part `place` in the order of all parts, and which part of the group it is."""
    group = dsl.ratio(place, numbers.by_parts, numbers.parts_shift)
    return group, place - group * numbers.parts


def _left(vectors, first, cut):
    """Vectors of the group from `first` on. If all parts are full, a constant that makes the comparisons disappear."""
    return Int32(NATURAL) if cut.even else vectors - first


def _word(address):
    """A part's statistics as they are now, negative until they are published."""
    return cute.arch.load(dsl.pointer(Int64, address), Int64, sem="relaxed", scope="gpu")


def _look(words, base, parts, thread, threads):
    """The word of a group's first part, and this thread's words of the AT_ONCE parts from `base` on."""
    at = [cutlass.min(base + thread + i * threads, parts - 1) for i in range(max(AT_ONCE // threads, 1))]
    return _word(words), *(_word(words + 8 * Int64(i)) for i in at)


def _any(numbers):
    """A number that is negative if one of them is."""
    return functools.reduce(operator.or_, numbers)


@cute.jit
def _prefetch(sRing, place, exists, stage, x, thread, numbers, cut: cutlass.Constexpr):
    """Begin to copy this thread's vectors of a part; if there is no such part, an empty group of copies."""
    if exists:
        group, part = _part_at(place, numbers)
        first = part * cut.share + thread
        source = x + 16 * (Int64(group) * Int64(numbers.vectors) + Int64(first))
        left = _left(numbers.vectors, first, cut)
        copy = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(copy, Uint32, num_bits_per_copy=8 * VECTOR_BYTES)
        for tile in cutlass.range_constexpr(cut.tiles):
            if tile * cut.threads < left:
                cute.copy(atom, dsl.words_at(source + 16 * tile * cut.threads), sRing[None, thread, tile, stage])
    cute.arch.cp_async_commit_group()


@cute.jit
def _publish(rX, word, sPart, half, begin, vectors, thread, cut: cutlass.Constexpr):
    """Compute mean and centred squares of a part per thread, per warp and for the block (one barrier); publish them.

    A warp's sums are relative to the mean of its first thread, the block's to that of its first warp. This limits the
    cancellation in S2 - S1^2 / n: what cancels is at most as many times the result as there are threads, or warps.
    """
    dtype, stride = cut.dtype, cut.threads
    left = _left(vectors, begin + thread, cut)
    count, vector = Float32(0.0), const_expr(128.0 / dtype.width)
    for tile in cutlass.range_constexpr(cut.tiles):
        count += cutlass.select_(tile * stride < left, Float32(vector), Float32(0.0))
    mean = dsl.quotient(dsl.total_of(rX, dtype, left, stride), cutlass.max(count, Float32(1.0)))
    squares = dsl.squares_of(dsl.afresh(rX), dtype, mean, left, stride)
    count, mean, squares = _merged(count, mean, squares, cute.arch.shuffle_sync(mean, 0), dsl.WARP)
    warp = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        sPart[0, warp, half], sPart[1, warp, half], sPart[2, warp, half] = count, mean, squares
    cute.arch.sync_threads()
    if warp == 0:
        lane = cute.arch.lane_idx() % cut.warps
        count, mean, squares = sPart[0, lane, half], sPart[1, lane, half], sPart[2, lane, half]
        _, mean, squares = _merged(count, mean, squares, sPart[1, 0, half], cut.warps)
        if thread == 0:
            low = Int64(Uint32(mean.bitcast(Int32)))
            high = Int64(squares.bitcast(Int32) & NATURAL)  # a NaN may have a sign
            cute.arch.store(dsl.pointer(Int64, word), high << 32 | low, sem="relaxed", scope="gpu")


def _merged(count, mean, squares, common, lanes):
    """Number, mean and centred squares of all lanes together; sums are relative to `common`, the mean of one lane."""
    apart = cutlass.select_(count > 0.0, mean - common, Float32(0.0))
    moved = count * apart
    squares = cute.arch.warp_reduction_sum(squares + moved * apart, threads_in_group=lanes)
    moved = cute.arch.warp_reduction_sum(moved, threads_in_group=lanes)
    count = cute.arch.warp_reduction_sum(count, threads_in_group=lanes)
    shift = dsl.quotient(moved, cutlass.max(count, Float32(1.0)))
    return count, common + shift, squares - moved * shift


@cute.jit
def _combined(words, seen, sGroup, half, looks, eps, thread, numbers, cut: cutlass.Constexpr):
    """Mean and inverse deviation of a group from the words of its parts, and a negative number if a word is missing.

    Sums are relative to the mean of the first part, which is among them: what cancels is at most as many times the
    result as there are parts.
    """
    vector = const_expr(128 // cut.dtype.width)
    threads, parts, vectors = cut.threads, numbers.parts, numbers.vectors
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
            held = Float32(cutlass.min(vectors - part * cut.share, cut.share) * vector)
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
    moved, squares = [dsl.tree([sGroup[i, warp, half] for warp in range(cut.warps)]) for i in range(2)]
    for i in cutlass.range_constexpr(cut.warps):
        least |= sGroup[2, i, half].bitcast(Int32)
    length = Float32(vectors * vector)
    shift = dsl.quotient(moved, length)
    variance = cute.arch.fmax(dsl.quotient(squares - moved * shift, length), Float32(0.0), nan=True)
    return Int32(seen[0]).bitcast(Float32) + shift, cute.math.rsqrt(variance + eps), least


@cute.jit
def _group(words, seen, group, x, shared, half, turn, looks, eps, thread, numbers, cut: cutlass.Constexpr):
    """Mean and inverse deviation of a group, how often to look next time, and the half of sGroup to use then.

    If a part's statistics are still missing after `looks` tries, this block computes them, and from then on looks once.
    """
    sPart, sGroup, sMissing = shared
    mean, scale, least = _combined(words, seen, sGroup, turn, looks, eps, thread, numbers, cut)
    turn = 1 - turn
    while least < 0:
        looks = Int32(1)
        rX = cute.make_rmem_tensor(cute.make_layout((dsl.WORDS, cut.tiles)), Uint32)
        for part in cutlass.range(numbers.parts, unroll=1):
            if thread == 0:
                sMissing[0] = Int32(_word(words + 8 * Int64(part)) >> 32)
            cute.arch.sync_threads()
            there = sMissing[0]
            cute.arch.sync_threads()
            if there < 0:
                begin = part * cut.share
                dsl.read(rX, x, group, begin + thread, cut.threads, numbers.vectors)
                _publish(rX, words + 8 * Int64(part), sPart, half, begin, numbers.vectors, thread, cut)
        seen = _look(words, Int32(0), numbers.parts, thread, cut.threads)
        mean, scale, least = _combined(words, seen, sGroup, turn, looks, eps, thread, numbers, cut)
        turn = 1 - turn
    return mean, scale, looks, turn


@cute.jit
def _write(rX, y, first, border, near, far, mean, vectors, cut: cutlass.Constexpr):
    """Write the output of this thread's vectors of a part, in the group at y. A part has at most two channels.

    The second channel begins at the vector `border`; near and far are the results of `dsl.affine` for the two.
    """
    rY = cute.make_rmem_tensor(cute.make_layout(dsl.WORDS * 32 // cut.dtype.width), cut.dtype)
    left = _left(vectors, first, cut)
    y = y + 16 * Int64(first)
    for tile in cutlass.range_constexpr(cut.tiles):
        if tile * cut.threads < left:
            is_near = first + tile * cut.threads < border
            slope = cutlass.select_(is_near, near[0], far[0])
            shift = cutlass.select_(is_near, near[1], far[1])
            made = dsl.output(rX, cut.dtype, tile, mean, slope, shift, rY)
            to = y + 16 * tile * cut.threads
            if const_expr(cut.store == ".cs"):
                cute.arch.store(dsl.pointer(Uint32, to, VECTOR_BYTES), made.load().ir_value(), cop="cs")
            else:
                cute.autovec_copy(made, dsl.words_at(to))


def shared_bytes(warps, tiles, stages):
    """Shared memory of a block: the ring, two halves of three numbers a warp for parts and for groups, one number."""
    return tiles * warps * dsl.WARP * VECTOR_BYTES * stages + 4 * (2 * 6 * warps + 1)


@cute.jit
def launch(
    addresses: tuple, numbers: tuple, eps: Float32, constants: cutlass.Constexpr, blocks: Int32, stream: driver.CUstream
):
    """Launch `blocks` blocks."""
    cut = Cut(*constants)
    ring_kernel(addresses, Numbers(*numbers), eps, cut).launch(
        grid=[blocks, 1, 1],
        block=[cut.threads, 1, 1],
        smem=shared_bytes(cut.warps, cut.tiles, cut.stages),
        stream=stream,
        use_pdl=cut.pdl,
        min_blocks_per_mp=cut.resident // cut.warps,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class RingLaunch(dsl.CuteLaunch):
    """One launch of the kernel: its tensors are y, x, weight, bias, words. A channel is no smaller than a part."""

    blocks: int
    patience: int

    name, function = "ring_kernel", staticmethod(launch)
    cut, numbers, scratch = Cut, Numbers, 1

    @property
    def even(self) -> bool:
        """Whether all parts are full."""
        return self.sizes[0] % (self.config.tiles * self.config.warps * dsl.WARP) == 0

    def shape(self) -> tuple[int, int, Numbers, int]:
        """See `dsl.CuteLaunch`."""
        (vectors, channel, *groups), config = self.sizes, self.config
        parts = -(-vectors // (config.tiles * config.warps * dsl.WARP))
        divided = channel, *dsl.divisor(channel), parts, *dsl.divisor(parts)
        shared = shared_bytes(config.warps, config.tiles, config.stages)
        return self.blocks, 1, Numbers(vectors, *divided, *groups, self.patience), shared
