"""Triton kernels of GroupNorm with SiLU: `whole_kernel` has a group in one program, the others split it over many.

A split group is cut into parts. `statistics_kernel` computes mean and centred squares of parts. The output is written
by `output_kernel`, after all statistics are there, or by `flow_kernel`, which computes the rest of them itself.
`fresh_kernel` runs before the CuTe DSL kernel of `ring.py`.

All take x as contiguous groups of N = group_channels * S elements, S (the spatial size) of each channel. A tile (`Cut`)
is [block / shared, shared]: a row of it has elements of one channel only, so that weight and bias are loaded once per
row. N, S and the numbers of groups are arguments, not constants: the pictures and frames of one model have dozens of
sizes, and each size would be compiled separately.

A statistic is a mean and a sum of centred squares. It is computed in two passes over registers, and statistics are
combined by Chan's formula; E[x^2] - E[x]^2 is never formed. Every sum has a fixed order, so that results are the same
from call to call.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kda_runtime.triton_rows import follow_the_kernel_ahead


class Cut(NamedTuple):
    """How the elements that a program has of a group are cut into tiles: a constant of the kernels."""

    block: int
    """Elements of a tile."""
    tiles: int
    """Tiles of a program."""
    full: int
    """How many of a program's tiles are sure to lie inside the group."""
    shared: int
    """Elements in a row of a tile, all of one channel: a power of two, at most a vector."""


class Writing(NamedTuple):
    """How y is written: a constant of the kernels that do it."""

    eps: float
    store: str
    """Cache modifier of the stores."""
    fast: bool
    """For 16-bit x: normalise with one multiplication and addition, and approximate SiLU."""


@triton.jit(do_not_specialize=["S", "groups", "group_channels"])
def whole_kernel(
    y,  # [B * groups, N]
    x,  # [B * groups, N]
    weight,  # [groups * group_channels]
    bias,  # [groups * group_channels]
    N,  # elements of a group
    S,  # elements of a channel
    groups,  # groups of one batch
    group_channels,
    CUT: tl.constexpr,  # `Cut`
    HOW: tl.constexpr,  # `Writing`
    AHEAD: tl.constexpr,  # weight and bias are loaded so many tiles before their use, at the price of registers
    PDL: tl.constexpr,
):
    """One program: a whole group, in registers from its only load to its store."""
    TILES: tl.constexpr = CUT.tiles
    group = tl.program_id(0)
    x += group.to(tl.int64) * N
    y += group.to(tl.int64) * N
    first_channel = _first_channel(group, groups, group_channels)
    weight += first_channel
    bias += first_channel

    follow_the_kernel_ahead(PDL)

    # All loads first: a thread keeps them in flight.
    values = _load(x, 0, N, CUT, "")
    affine = ()
    for tile in tl.static_range(AHEAD):
        affine += (_affine(weight, bias, 0, tile, N, S, CUT),)

    mean, squares = _moments(values, 0, N, CUT)
    scale = tl.rsqrt(squares / N + HOW.eps)

    for tile in tl.static_range(TILES):
        if tile + AHEAD < TILES:
            affine += (_affine(weight, bias, 0, tile + AHEAD, N, S, CUT),)
        scaled = _scaled(affine[tile], mean, scale, HOW)
        _write(y, values[tile], mean, scaled, 0, tile, N, CUT, HOW)


@triton.jit(do_not_specialize=["total", "parts", "head"])
def statistics_kernel(
    partials,  # [total, parts] int64: mean and centred squares of every part, packed; with SLOTS one more, the ticket
    x,  # [total, N]
    N,
    total,  # groups of all batches
    parts,  # programs of a group
    head,  # number of parts, in the order of all groups, whose statistics are computed
    CUT: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,  # tell the cache to keep x until its second reading, and to drop it then
    SLOTS: tl.constexpr,  # other entries of `partials` that a program initialises for `flow_kernel`
):
    """One program: the statistics of one part."""
    part, group = tl.program_id(0), _second()
    # Whatever wrote x has to end first, and whatever used the memory of `partials`.
    follow_the_kernel_ahead(PDL, EARLY=True)
    place = group.to(tl.int64) * parts + part
    if (place < head) & (group < total):
        begin = part * (CUT.block * CUT.tiles)
        values = _load(x + group.to(tl.int64) * N, begin, N, CUT, "evict_last" if HINTS else "")
        mean, squares = _moments(values, begin, N, CUT)
        tl.store(partials + place, _packed(mean, squares))
        if SLOTS > 0:
            entry = place * SLOTS + tl.arange(0, SLOTS)
            last = total.to(tl.int64) * parts
            tl.store(partials + entry, tl.where(entry < last, -1, 0), mask=(entry >= head) & (entry <= last))


@triton.jit(do_not_specialize=["S", "groups", "group_channels", "total", "parts"])
def output_kernel(
    y,  # [total, N]
    x,  # [total, N]
    weight,  # [groups * group_channels]
    bias,  # [groups * group_channels]
    partials,  # [total, parts]
    N,
    S,
    groups,
    group_channels,
    total,
    parts,
    CUT: tl.constexpr,
    HOW: tl.constexpr,
    TWO: tl.constexpr,  # no part has elements of more than two channels
    PARTS: tl.constexpr,  # `parts`, or the next power of two
    REVERSE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,
):
    """One program: the output of one part."""
    part, group = tl.program_id(0), _second()
    if REVERSE:  # back to front: what was read last is what the cache still has
        part = parts - 1 - part
        group = tl.num_programs(1) * tl.num_programs(2) - 1 - group
    # This launch begins when every program of the previous launch has passed its own wait, so x is complete. Only
    # `partials`, which those programs write, has to be waited for.
    if not EARLY:
        follow_the_kernel_ahead(PDL)
    if group < total:
        begin = part * (CUT.block * CUT.tiles)
        values = _load(x + group.to(tl.int64) * N, begin, N, CUT, "evict_first" if HINTS else "")
        first_channel = _first_channel(group, groups, group_channels)
        weight += first_channel
        bias += first_channel
        near = _quotient(begin, S)
        affine = ()
        if not TWO:
            affine = _affines(weight, bias, near, begin, N, S, group_channels, CUT, TWO)
        if EARLY:
            follow_the_kernel_ahead(PDL)
        if TWO:  # one trip to memory with the partial results, whose loads would wait for any earlier ones
            affine = _affines(weight, bias, near, begin, N, S, group_channels, CUT, TWO)
        # 32 parts at a time, or a quarter if there are many: sums within a warp need no shared memory and no barrier.
        # With an eighth at a time the kernel took more than 80 registers, and a third block had no room.
        WIDE: tl.constexpr = PARTS // 4 if PARTS > 128 else min(PARTS, 32)
        partials += group.to(tl.int64) * parts
        first = tl.load(partials)
        words = _words(partials, parts, PARTS, WIDE, False)
        common = _unpacked(first)[0]
        mean, scale = _combine(words, common, N, parts, CUT, HOW, PARTS, WIDE)
        y += group.to(tl.int64) * N
        _finish(y, values, affine, mean, scale, near, begin, N, S, CUT, HOW, TWO)


@triton.jit(do_not_specialize=["S", "groups", "group_channels", "total", "parts", "head"])
def flow_kernel(
    y,  # [total, N]
    x,  # [total, N]
    weight,  # [groups * group_channels]
    bias,  # [groups * group_channels]
    partials,  # [total * parts + 1] int64: as above, negative where there are none yet; then the next ticket
    N,
    S,
    groups,
    group_channels,
    total,
    parts,
    head,  # number of parts whose statistics the previous launch has computed: those of the first group and more
    CUT: tl.constexpr,
    HOW: tl.constexpr,
    TWO: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    REVERSE: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,
):
    """The output of all parts, and their statistics, `head` parts before it. Programs take the ticket that is next.

    Ticket t is first the statistics of part head + t, if there is one, and then the output of part t, which waits until
    all parts of its group have statistics. A part's statistics are one word, which is negative until they are there, so
    that no other memory access has to be ordered.

    It cannot hang as long as programs that have begun keep running, however many there are and whenever others begin.
    An output waits only for statistics of lower tickets, and statistics wait for nothing. A program finishes its
    tickets in ascending order, so the lowest unfinished ticket never waits for long. So a program may take its next
    ticket early.
    """
    follow_the_kernel_ahead(PDL)
    every = total * parts
    ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)
    while ticket < every:
        place = ticket
        if place + head < every:
            group = _quotient(place + head, parts)
            begin = (place + head - group * parts) * (CUT.block * CUT.tiles)
            values = _load(x + group.to(tl.int64) * N, begin, N, CUT, "evict_last" if HINTS else "")
            ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)  # in flight together with x
            mean, squares = _moments(values, begin, N, CUT)
            tl.atomic_xchg(partials + place + head, _packed(mean, squares), sem="relaxed")
        else:
            ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)
        group = _quotient(place, parts)
        part = place - group * parts
        if REVERSE:  # back to front: what was read last is what the cache still has
            part = parts - 1 - part
        begin = part * (CUT.block * CUT.tiles)
        values = _load(x + group.to(tl.int64) * N, begin, N, CUT, "evict_first" if HINTS else "")
        channel = _first_channel(group, groups, group_channels)
        near = _quotient(begin, S)
        affine = _affines(weight + channel, bias + channel, near, begin, N, S, group_channels, CUT, TWO)
        common, words = _awaited(partials + group * parts, parts, PARTS, THREADS)
        WIDE: tl.constexpr = max(PARTS, THREADS)
        mean, scale = _combine(words, common, N, parts, CUT, HOW, WIDE, WIDE)
        rows = y + group.to(tl.int64) * N
        _finish(rows, values, affine, mean, scale, near, begin, N, S, CUT, HOW, TWO)


@triton.jit(do_not_specialize=["count"])
def fresh_kernel(partials, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set the words of all parts to -1, as `ring_kernel` expects them: no part has statistics yet."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Whatever used the memory of `partials` has to end.
    follow_the_kernel_ahead(PDL, EARLY=True)
    tl.store(partials + place, tl.full((BLOCK,), -1, tl.int64), mask=place < count)


@triton.jit
def _second():
    """A program's index over the grid's second and third dimension, each of which is limited to 65535."""
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)


@triton.jit
def _packed(mean, squares):
    """Mean and centred squares as one int64 that is not negative; it is stored and loaded as a whole."""
    low = mean.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return ((squares.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32) | low  # a NaN may have a sign


@triton.jit
def _unpacked(word):
    """The mean and the centred squares."""
    return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _words(partials, parts, PARTS: tl.constexpr, WIDE: tl.constexpr, VOLATILE: tl.constexpr):
    """The words of a group's parts, WIDE at a time, 0 after the last part."""
    words = ()
    for begin in tl.static_range(0, PARTS, WIDE):
        part = begin + tl.arange(0, WIDE)
        if begin + WIDE <= PARTS // 2:  # there are more parts than that
            words += (tl.load(partials + part, volatile=VOLATILE),)
        else:
            words += (tl.load(partials + part, mask=part < parts, other=0, volatile=VOLATILE),)
    return words


@triton.jit
def _awaited(partials, parts, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Wait for all words of a group; return the mean of its first part, and the words.

    Threads may see a word at different times, but must agree on when to go on. So each thread loads its own words and
    its own copy of the first word, and the minimum is over all of these.
    """
    WIDE: tl.constexpr = max(PARTS, THREADS)
    words = _words(partials, parts, WIDE, WIDE, True)
    first = tl.load(partials, volatile=True)
    while tl.min((tl.minimum(words[0], first) >> 32).to(tl.int32), axis=0) < 0:
        words = _words(partials, parts, WIDE, WIDE, True)
        first = tl.load(partials, volatile=True)
    return _unpacked(first)[0], words


@triton.jit
def _affines(weight, bias, near, begin, N, S, group_channels, CUT: tl.constexpr, TWO: tl.constexpr):
    """Weight and bias for each tile of a part; if TWO, for the two channels that a part may have: `near` and far."""
    TILES: tl.constexpr = CUT.tiles
    if TWO:
        far = tl.minimum(near + 1, group_channels - 1)
        return (tl.load(weight + near), tl.load(bias + near)), (tl.load(weight + far), tl.load(bias + far))
    else:
        affine = ()
        for tile in tl.static_range(TILES):
            affine += (_affine(weight, bias, begin, tile, N, S, CUT),)
        return affine


@triton.jit
def _finish(y, values, affine, mean, scale, near, begin, N, S, CUT: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr):
    """The output of a part, which begins at element `begin` of its group."""
    TILES: tl.constexpr = CUT.tiles
    if TWO:
        border = (near + 1) * S  # where the far channel begins
        near, far = _scaled(affine[0], mean, scale, HOW), _scaled(affine[1], mean, scale, HOW)
    for tile in tl.static_range(TILES):
        if TWO:
            is_near = _places(begin, tile, CUT)[0] < border
            scaled = tl.where(is_near, near[0], far[0]), tl.where(is_near, near[1], far[1])
        else:
            scaled = _scaled(affine[tile], mean, scale, HOW)
        _write(y, values[tile], mean, scaled, begin, tile, N, CUT, HOW)


@triton.jit
def _quotient(a, b):
    """Natural numbers below 2^31, a // b; without signs the division is shorter."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _first_channel(group, groups, group_channels):
    """The first channel of a group, counted within its batch."""
    return (group - _quotient(group, groups) * groups) * group_channels


@triton.jit
def _places(begin, tile: tl.constexpr, CUT: tl.constexpr):
    """Where the elements of a tile lie in the group, [block / shared, shared], as rows and columns."""
    row = tl.arange(0, CUT.block // CUT.shared)[:, None]
    return begin + (tile * CUT.block + row * CUT.shared), tl.arange(0, CUT.shared)[None, :]


@triton.jit
def _load(x, begin, N, CUT: tl.constexpr, EVICT: tl.constexpr):
    """A group's tiles from element `begin` on, each [block / shared, shared], 0 after the group's end."""
    TILES: tl.constexpr = CUT.tiles
    tiles = ()
    for tile in tl.static_range(TILES):
        row, col = _places(begin, tile, CUT)
        if tile < CUT.full:
            tiles += (tl.load(x + (row + col), eviction_policy=EVICT),)
        else:  # `shared` divides N, so that a row is inside as a whole or not at all
            tiles += (tl.load(x + (row + col), mask=row < N, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def _affine(weight, bias, begin, tile: tl.constexpr, N, S, CUT: tl.constexpr):
    """Weight and bias of a tile, once for every row, [block / shared, 1]; the pointers are those of the group."""
    row, _ = _places(begin, tile, CUT)
    channel = _quotient(row, S)
    if tile < CUT.full:
        return tl.load(weight + channel), tl.load(bias + channel)
    else:
        inside = row < N
        return tl.load(weight + channel, mask=inside, other=0.0), tl.load(bias + channel, mask=inside, other=0.0)


@triton.jit
def _moments(tiles, begin, N, CUT: tl.constexpr):
    """Mean and sum of centred squares of what the tiles hold of the group, float32."""
    TILES: tl.constexpr = CUT.tiles
    # Tiles are added element by element first: then a statistic takes one reduction across threads, of short sums.
    total = tiles[0].to(tl.float32)  # [block / shared, shared]
    for tile in tl.static_range(1, TILES):
        total += tiles[tile].to(tl.float32)
    # The mean is corrected by its remainder: if it is large beside the deviation, its last digit decides the error of
    # the result.
    total = _sum(total)
    if CUT.full < TILES:
        count = tl.minimum(N - begin, CUT.block * TILES).to(tl.float32)
    else:
        count = tl.full((), CUT.block * TILES, tl.float32)
    inverse = 1.0 / count
    mean = total * inverse
    mean = tl.fma(tl.fma(mean, -count, total), inverse, mean)
    squares = tl.zeros_like(tiles[0].to(tl.float32))
    for tile in tl.static_range(TILES):
        centred = tiles[tile].to(tl.float32) - mean
        if tile >= CUT.full:
            centred = tl.where(_places(begin, tile, CUT)[0] < N, centred, 0.0)
        squares += centred * centred
    return mean, _sum(squares)


@triton.jit
def _sum(tile):
    """The sum of a tile: along the rows, which are in one thread each, then across."""
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def _combine(words, common, N, parts, CUT: tl.constexpr, HOW: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Mean of a group, and its scale 1 / sqrt(variance + eps), from the statistics of its parts.

    Means are taken relative to `common`, the first one, so that a common offset costs no digits.
    """
    PART: tl.constexpr = CUT.block * CUT.tiles  # elements
    counts = ()
    for begin in tl.static_range(0, PARTS, WIDE):
        if begin + WIDE <= PARTS // 2:
            counts += (tl.full((WIDE,), PART, tl.float32),)
        else:
            part = begin + tl.arange(0, WIDE)
            held = PART if CUT.full == CUT.tiles else tl.minimum(N - part * PART, PART)
            counts += (tl.where(part < parts, held, 0).to(tl.float32),)
    moved = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        moved += counts[chunk] * (_unpacked(words[chunk])[0] - common)
    mean = tl.sum(moved, axis=0) / N
    spread = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        centred = (_unpacked(words[chunk])[0] - common) - mean
        spread += _unpacked(words[chunk])[1] + counts[chunk] * centred * centred
    return common + mean, tl.rsqrt(tl.sum(spread, axis=0) / N + HOW.eps)


@triton.jit
def _scaled(affine, mean, scale, HOW: tl.constexpr):
    """Factor and offset in float32, from weight and bias: the factor is for x if `fast`, else for x - mean."""
    weight = affine[0].to(tl.float32) * scale
    bias = affine[1].to(tl.float32)
    if HOW.fast:
        bias = tl.fma(-mean, weight, bias)
    return weight, bias


@triton.jit
def _write(y, values, mean, affine, begin, tile: tl.constexpr, N, CUT: tl.constexpr, HOW: tl.constexpr):
    """Normalise a tile by `affine`, which `_scaled` gives, SiLU, and store."""
    row, col = _places(begin, tile, CUT)
    values = values.to(tl.float32)
    normed = (values if HOW.fast else values - mean) * affine[0] + affine[1]
    value = _silu(normed, HOW.fast).to(y.dtype.element_ty)
    if tile < CUT.full:
        tl.store(y + (row + col), value, cache_modifier=HOW.store)
    else:
        tl.store(y + (row + col), value, mask=row < N, cache_modifier=HOW.store)


@triton.jit
def _silu(x, FAST: tl.constexpr):
    """SiLU, x / (1 + exp(-x)). Where the exponential is infinite, the result is 0 and no NaN."""
    if FAST:  # the exponential and the reciprocal are off by 2e-7 of their values
        power = _approximate("ex2.approx.ftz.f32", x * -1.4426950408889634)
        return x * _approximate("rcp.approx.ftz.f32", 1.0 + power)
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def _approximate(OPERATION: tl.constexpr, x):
    """One instruction of the special-function unit, which the interpreter does not have."""
    ASSEMBLY: tl.constexpr = OPERATION + " $0, $1;"
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [x], tl.float32, is_pure=True, pack=1)
