"""The Triton kernels: `whole` has a group in one program, `stretch` has a group in many programs and several launches.

Both take x as a row of groups, each of N = group_channels * S elements one after the other, S of them (the spatial
size) in every channel. A tile is [BLOCK / V, V]: V elements that are sure to be of one channel, so that weight and bias
are loaded once for V of them. N, S and the numbers of groups are arguments, not constants: the pictures and frames of
one model have dozens of sizes, and each of them would be compiled for itself.

A statistic is a mean and a sum of centred squares, taken in two passes over registers and combined by Chan's formula;
E[x^2] - E[x]^2 is never formed. Every sum has a fixed order, so that results are the same from call to call.
"""

import triton
import triton.language as tl


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
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a tile
    TILES: tl.constexpr,  # tiles of a group
    FULL: tl.constexpr,  # how many of the tiles are sure to lie inside the group
    V: tl.constexpr,  # elements that share a channel
    AHEAD: tl.constexpr,  # so many tiles ahead weight and bias are loaded, at the price of registers
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: a whole group, in registers from its only load to its store."""
    group = tl.program_id(0)
    x += group.to(tl.int64) * N
    y += group.to(tl.int64) * N
    first_channel = _first_channel(group, groups, group_channels)
    weight += first_channel
    bias += first_channel

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # All loads first: a thread keeps them in flight.
    values = _load(x, 0, N, BLOCK, TILES, FULL, V, "")
    affine = ()
    for tile in tl.static_range(AHEAD):
        affine += (_affine(weight, bias, 0, tile, N, S, BLOCK, FULL, V),)

    mean, squares = _moments(values, 0, N, BLOCK, TILES, FULL, V)
    scale = tl.rsqrt(squares / N + EPS)

    for tile in tl.static_range(TILES):
        if tile + AHEAD < TILES:
            affine += (_affine(weight, bias, 0, tile + AHEAD, N, S, BLOCK, FULL, V),)
        weights, biases = affine[tile]
        weights, biases = weights.to(tl.float32) * scale, biases.to(tl.float32)
        _write(y, values[tile], mean, weights, biases, 0, tile, N, BLOCK, FULL, V, STORE)


@triton.jit(do_not_specialize=["S", "groups", "group_channels", "total", "wave", "parts", "first"])
def stretch_kernel(
    y,  # [total, N]; None without NORMALISE
    x,  # [total, N]
    weight,  # [groups * group_channels]; None without NORMALISE
    bias,  # [groups * group_channels]; None without NORMALISE
    partials,  # [total, 2, parts] float32: mean and centred squares of every part
    N,
    S,
    groups,
    group_channels,
    total,  # groups of all batches
    wave,  # groups of a wave
    parts,  # programs of a group
    first,  # the group with which the wave of STATISTICS begins
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a part
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,  # no part has elements of more than two channels
    PARTS: tl.constexpr,  # `parts`, or the next power of two; 0 without NORMALISE
    STATISTICS: tl.constexpr,
    NORMALISE: tl.constexpr,
    REVERSE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,  # tell the cache to keep x for its second reading, and to let it go behind it
    STORE: tl.constexpr,
):
    """One program: the statistics of one part of a wave, or the output of one part of the wave before it."""
    part, group = tl.program_id(0), tl.program_id(1)  # a part of a group of the wave: nothing has to be divided
    # The first launch waits for whatever wrote x. A later one begins when every program of the launch before has come
    # past its own wait, so x is there: only `partials`, which other programs wrote, has to be waited for.
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WAIT: tl.constexpr = PDL and EARLY
    if STATISTICS and NORMALISE:
        # In turns, so that reading and writing go side by side on every multiprocessor.
        if part % 2 == 1:
            if WAIT:
                tl.extra.cuda.gdc_launch_dependents()
            _gather(partials, x, first + group, part // 2, N, total, parts, BLOCK, TILES, FULL, V, HINTS)
        else:
            _finish(
                y,
                x,
                weight,
                bias,
                partials,
                first - wave,
                group,
                part // 2,
                N,
                S,
                groups,
                group_channels,
                parts,
                EPS,
                BLOCK,
                TILES,
                FULL,
                V,
                TWO,
                PARTS,
                REVERSE,
                WAIT,
                HINTS,
                STORE,
            )
    elif STATISTICS:
        _gather(partials, x, first + group, part, N, total, parts, BLOCK, TILES, FULL, V, HINTS)
    else:
        _finish(
            y,
            x,
            weight,
            bias,
            partials,
            first - wave,
            group,
            part,
            N,
            S,
            groups,
            group_channels,
            parts,
            EPS,
            BLOCK,
            TILES,
            FULL,
            V,
            TWO,
            PARTS,
            REVERSE,
            WAIT,
            HINTS,
            STORE,
        )


@triton.jit
def _gather(
    partials,
    x,
    group,
    part,
    N,
    total,
    parts,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    HINTS: tl.constexpr,
):
    """The statistics of a part of a group."""
    begin = part * (BLOCK * TILES)
    if group < total:  # the last wave may have fewer groups
        kept = partials + group * 2 * parts + part
        values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, "evict_last" if HINTS else "")
        mean, squares = _moments(values, begin, N, BLOCK, TILES, FULL, V)
        tl.store(kept, mean)
        tl.store(kept + parts, squares)


@triton.jit
def _finish(
    y,
    x,
    weight,
    bias,
    partials,
    first,
    place,
    part,
    N,
    S,
    groups,
    group_channels,
    parts,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
    WAIT: tl.constexpr,
    HINTS: tl.constexpr,
    STORE: tl.constexpr,
):
    """The output of a part of the group at `place` in the wave that begins with group `first`."""
    if REVERSE:  # back to front: what was read last is what the cache still has
        place = tl.num_programs(1) - 1 - place
        part = parts - 1 - part
    group = first + place
    begin = part * (BLOCK * TILES)
    values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, "evict_first" if HINTS else "")
    first_channel = _first_channel(group, groups, group_channels)
    weight += first_channel
    bias += first_channel
    affine = ()
    if TWO:
        near = _quotient(begin, S)
        far = tl.minimum(near + 1, group_channels - 1)
        border = (near + 1) * S  # where the far channel begins
    else:
        for tile in tl.static_range(TILES):
            affine += (_affine(weight, bias, begin, tile, N, S, BLOCK, FULL, V),)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TWO:  # one trip to memory with the partial results; earlier loads were waited for before it began
        affine = (tl.load(weight + near), tl.load(bias + near), tl.load(weight + far), tl.load(bias + far))
    mean, squares = _combine(partials, group, N, parts, BLOCK * TILES, FULL == TILES, PARTS)
    scale = tl.rsqrt(squares / N + EPS)
    y += group.to(tl.int64) * N
    for tile in tl.static_range(TILES):
        if TWO:
            is_near = _places(begin, tile, BLOCK, V)[0] < border
            weights = tl.where(is_near, affine[0].to(tl.float32) * scale, affine[2].to(tl.float32) * scale)
            biases = tl.where(is_near, affine[1].to(tl.float32), affine[3].to(tl.float32))
        else:
            weights = affine[tile][0].to(tl.float32) * scale
            biases = affine[tile][1].to(tl.float32)
        _write(y, values[tile], mean, weights, biases, begin, tile, N, BLOCK, FULL, V, STORE)


@triton.jit
def _quotient(a, b):
    """Natural numbers below 2^31, a // b; without signs the division is shorter."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _first_channel(group, groups, group_channels):
    """The channel with which a group begins, of those of its batch."""
    return (group - _quotient(group, groups) * groups) * group_channels


@triton.jit
def _places(begin, tile: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr):
    """Where in the group the elements of a tile lie, [BLOCK / V, V]; its first column is where their channels begin."""
    row = tl.arange(0, BLOCK // V)[:, None]
    return begin + (tile * BLOCK + row * V), tl.arange(0, V)[None, :]


@triton.jit
def _load(
    x, begin, N, BLOCK: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr, EVICT: tl.constexpr
):
    """A group's tiles from element `begin` on, each [BLOCK / V, V], 0 behind the group's end."""
    tiles = ()
    for tile in tl.static_range(TILES):
        row, col = _places(begin, tile, BLOCK, V)
        if tile < FULL:
            tiles += (tl.load(x + (row + col), eviction_policy=EVICT),)
        else:  # V divides N, so that a row is inside as a whole or not at all
            tiles += (tl.load(x + (row + col), mask=row < N, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def _affine(weight, bias, begin, tile: tl.constexpr, N, S, BLOCK: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr):
    """Weight and bias of a tile, once for every V elements, [BLOCK / V, 1]; the pointers are those of the group."""
    row, _ = _places(begin, tile, BLOCK, V)
    channel = _quotient(row, S)
    if tile < FULL:
        return tl.load(weight + channel), tl.load(bias + channel)
    else:
        inside = row < N
        return tl.load(weight + channel, mask=inside, other=0.0), tl.load(bias + channel, mask=inside, other=0.0)


@triton.jit
def _moments(tiles, begin, N, BLOCK: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr):
    """Mean and sum of centred squares of what the tiles hold of the group, float32."""
    # Tiles are added element by element first: one reduction across threads a statistic, and short sums.
    total = tiles[0].to(tl.float32)  # [BLOCK / V, V]
    for tile in tl.static_range(1, TILES):
        total += tiles[tile].to(tl.float32)
    # Corrected by its remainder: where a mean is large beside the deviation, its last digit is the result's error.
    total = _sum(total)
    if FULL < TILES:
        count = tl.minimum(N - begin, BLOCK * TILES).to(tl.float32)
    else:
        count = tl.full((), BLOCK * TILES, tl.float32)
    inverse = 1.0 / count
    mean = total * inverse
    mean = tl.fma(tl.fma(mean, -count, total), inverse, mean)
    squares = tl.zeros_like(tiles[0].to(tl.float32))
    for tile in tl.static_range(TILES):
        centred = tiles[tile].to(tl.float32) - mean
        if tile >= FULL:
            centred = tl.where(_places(begin, tile, BLOCK, V)[0] < N, centred, 0.0)
        squares += centred * centred
    return mean, _sum(squares)


@triton.jit
def _sum(tile):
    """The sum of a tile: along the rows, which are in one thread each, then across."""
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def _combine(partials, group, N, parts, PART: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr):
    """Mean and sum of centred squares of a group from those of its parts; EVEN: each of them has PART elements."""
    # 32 parts at a time, or a quarter of many: what a warp adds alone takes no shared memory and no barrier. With
    # an eighth at a time the kernel took more than 80 registers, and a third block had no room.
    WIDE: tl.constexpr = PARTS // 4 if PARTS > 128 else min(PARTS, 32)
    part = tl.arange(0, WIDE)
    place = partials + group * 2 * parts + part
    # Means are taken relative to the first one, so that what they have in common costs no digits.
    common = tl.load(partials + group * 2 * parts)
    counts = ()
    means = ()
    squares = ()
    for begin in tl.static_range(0, PARTS, WIDE):
        if begin + WIDE <= PARTS // 2:  # there are more parts than that
            counts += (tl.full((WIDE,), PART, tl.float32),)
            means += (tl.load(place + begin),)
            squares += (tl.load(place + parts + begin),)
        else:
            inside = begin + part < parts
            held = PART if EVEN else tl.minimum(N - (begin + part) * PART, PART)
            counts += (tl.where(inside, held, 0).to(tl.float32),)
            means += (tl.load(place + begin, mask=inside, other=0.0),)
            squares += (tl.load(place + parts + begin, mask=inside, other=0.0),)
    moved = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        moved += counts[chunk] * (means[chunk] - common)
    mean = tl.sum(moved, axis=0) / N
    spread = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        centred = (means[chunk] - common) - mean
        spread += squares[chunk] + counts[chunk] * centred * centred
    return common + mean, tl.sum(spread, axis=0)


@triton.jit
def _write(
    y,
    values,
    mean,
    weights,
    biases,
    begin,
    tile: tl.constexpr,
    N,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    STORE: tl.constexpr,
):
    """Normalise a tile, apply weight and bias (float32, the weight divided by the deviation), SiLU, and store."""
    row, col = _places(begin, tile, BLOCK, V)
    normed = (values.to(tl.float32) - mean) * weights + biases
    value = _silu(normed, y.dtype.element_ty).to(y.dtype.element_ty)
    if tile < FULL:
        tl.store(y + (row + col), value, cache_modifier=STORE)
    else:
        tl.store(y + (row + col), value, mask=row < N, cache_modifier=STORE)


@triton.jit
def _silu(x, DTYPE: tl.constexpr):
    """SiLU, x / (1 + exp(-x)). Where the exponential is infinite, the result is 0 and no NaN."""
    if DTYPE.is_fp32():
        return x / (1.0 + tl.exp(-x))
    else:
        # A third of the instructions of a whole element otherwise; 1 / a as rsqrt(a)^2 is off by 3e-7 of its value.
        root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
        return x * root * root
