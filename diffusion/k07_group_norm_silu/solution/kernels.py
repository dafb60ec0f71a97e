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
    EARLY: tl.constexpr,  # load weight and bias before the statistics, at the price of registers
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: a whole group, in registers from its only load to its store."""
    group = tl.program_id(0)
    x += group.to(tl.int64) * N
    y += group.to(tl.int64) * N
    weight += (group % groups) * group_channels
    bias += (group % groups) * group_channels

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # All loads first: a thread keeps them in flight.
    values = _load(x, 0, N, BLOCK, TILES, FULL, V, "")
    early = _affine(weight, bias, 0, N, S, BLOCK, TILES if EARLY else 0, FULL, V)

    mean, squares = _moments(values, 0, N, BLOCK, TILES, FULL, V)
    scale = tl.rsqrt(squares / N + EPS)

    _write(y, values, early, weight, bias, mean, scale, 0, N, S, BLOCK, TILES, FULL, V, EARLY, STORE)


@triton.jit(do_not_specialize=["S", "groups", "group_channels", "total", "wave", "parts", "first"])
def stretch_kernel(
    y,  # [total, N]; None without NORMALISE
    x,  # [total, N]
    weight,  # [groups * group_channels]; None without NORMALISE
    bias,  # [groups * group_channels]; None without NORMALISE
    partials,  # [2, total, parts] float32: mean and centred squares of every part
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
    PARTS: tl.constexpr,  # a power of two, `parts` or more
    STATISTICS: tl.constexpr,
    NORMALISE: tl.constexpr,
    REVERSE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,  # tell the cache to keep x for its second reading, and to let it go behind it
    STORE: tl.constexpr,
):
    """One program: the statistics of one part of a wave, or the output of one part of the wave before it."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # The first launch waits for whatever wrote x. A later one begins when every program of the launch before has come
    # past its own wait, so x is there: only `partials`, which other programs wrote, has to be waited for.
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WAIT: tl.constexpr = PDL and EARLY
    if STATISTICS and NORMALISE:
        # In turns, so that reading and writing go side by side on every multiprocessor.
        pair = program // 2
        if program % 2 == 1:
            if WAIT:
                tl.extra.cuda.gdc_launch_dependents()
            _gather(partials, x, pair, N, total, parts, first, BLOCK, TILES, FULL, V, HINTS)
        else:
            place = programs // 2 - 1 - pair if REVERSE else pair
            _finish(
                y,
                x,
                weight,
                bias,
                partials,
                place,
                N,
                S,
                groups,
                group_channels,
                total,
                parts,
                first - wave,
                EPS,
                BLOCK,
                TILES,
                FULL,
                V,
                PARTS,
                WAIT,
                HINTS,
                STORE,
            )
    elif STATISTICS:
        _gather(partials, x, program, N, total, parts, first, BLOCK, TILES, FULL, V, HINTS)
    else:
        # Back to front, if REVERSE: what was read last is what the cache still has.
        place = programs - 1 - program if REVERSE else program
        _finish(
            y,
            x,
            weight,
            bias,
            partials,
            place,
            N,
            S,
            groups,
            group_channels,
            total,
            parts,
            first - wave,
            EPS,
            BLOCK,
            TILES,
            FULL,
            V,
            PARTS,
            WAIT,
            HINTS,
            STORE,
        )


@triton.jit
def _gather(
    partials,
    x,
    place,
    N,
    total,
    parts,
    first,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    HINTS: tl.constexpr,
):
    """The statistics of part number `place` of the wave that begins with group `first`."""
    group = first + place // parts
    part = place % parts
    begin = part * (BLOCK * TILES)
    if group < total:  # the last wave may have fewer groups
        values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, "evict_last" if HINTS else "")
        mean, squares = _moments(values, begin, N, BLOCK, TILES, FULL, V)
        kept = partials + group * parts + part
        tl.store(kept, mean)
        tl.store(kept + total * parts, squares)


@triton.jit
def _finish(
    y,
    x,
    weight,
    bias,
    partials,
    place,
    N,
    S,
    groups,
    group_channels,
    total,
    parts,
    first,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    WAIT: tl.constexpr,
    HINTS: tl.constexpr,
    STORE: tl.constexpr,
):
    """The output of part number `place` of the wave that begins with group `first`."""
    group = first + place // parts
    begin = (place % parts) * (BLOCK * TILES)
    weight += (group % groups) * group_channels
    bias += (group % groups) * group_channels
    values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, "evict_first" if HINTS else "")
    early = _affine(weight, bias, begin, N, S, BLOCK, TILES, FULL, V)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mean, squares = _combine(partials, group, N, total, parts, BLOCK * TILES, PARTS)
    scale = tl.rsqrt(squares / N + EPS)
    y += group.to(tl.int64) * N
    _write(y, values, early, weight, bias, mean, scale, begin, N, S, BLOCK, TILES, FULL, V, True, STORE)


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
        else:
            tiles += (tl.load(x + (row + col), mask=row + col < N, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def _affine(weight, bias, begin, N, S, BLOCK: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr):
    """Weight and bias of TILES tiles; the pointers are those of the group's channels."""
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (_affine_of(weight, bias, begin, tile, N, S, BLOCK, FULL, V),)
    return loaded


@triton.jit
def _affine_of(weight, bias, begin, tile: tl.constexpr, N, S, BLOCK: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr):
    """Weight and bias of a tile, once for every V elements: [BLOCK / V, 1] each."""
    row, _ = _places(begin, tile, BLOCK, V)
    if tile < FULL:
        return tl.load(weight + row // S), tl.load(bias + row // S)
    else:
        inside = row < N
        return tl.load(weight + row // S, mask=inside, other=0.0), tl.load(bias + row // S, mask=inside, other=0.0)


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
            row, col = _places(begin, tile, BLOCK, V)
            centred = tl.where(row + col < N, centred, 0.0)
        squares += centred * centred
    return mean, _sum(squares)


@triton.jit
def _sum(tile):
    """The sum of a tile: along the rows, which are in one thread each, then across."""
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def _combine(partials, group, N, total, parts, PART: tl.constexpr, PARTS: tl.constexpr):
    """Mean and sum of centred squares of a group from those of its parts."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    place = partials + group * parts + part
    count = tl.where(inside, tl.minimum(N - part * PART, PART), 0).to(tl.float32)
    # Means are taken relative to the first one, so that what they have in common costs no digits.
    common = tl.load(partials + group * parts)
    means = tl.where(inside, tl.load(place, mask=inside, other=0.0) - common, 0.0)
    squares = tl.load(place + total * parts, mask=inside, other=0.0)
    mean = tl.sum(count * means, axis=0) / N
    centred = means - mean
    return common + mean, tl.sum(squares + count * centred * centred, axis=0)


@triton.jit
def _write(
    y,
    tiles,
    early,
    weight,
    bias,
    mean,
    scale,
    begin,
    N,
    S,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    EARLY: tl.constexpr,
    STORE: tl.constexpr,
):
    """Normalise, apply weight and bias (those loaded `early`, if so), SiLU, and store TILES tiles."""
    for tile in tl.static_range(TILES):
        row, col = _places(begin, tile, BLOCK, V)
        weights, biases = early[tile] if EARLY else _affine_of(weight, bias, begin, tile, N, S, BLOCK, FULL, V)
        normed = (tiles[tile].to(tl.float32) - mean) * (weights.to(tl.float32) * scale) + biases.to(tl.float32)
        value = _silu(normed, y.dtype.element_ty).to(y.dtype.element_ty)
        if tile < FULL:
            tl.store(y + (row + col), value, cache_modifier=STORE)
        else:
            tl.store(y + (row + col), value, mask=row + col < N, cache_modifier=STORE)


@triton.jit
def _silu(x, DTYPE: tl.constexpr):
    """SiLU, x / (1 + exp(-x)). Where the exponential is infinite, the result is 0 and no NaN."""
    if DTYPE.is_fp32():
        return x / (1.0 + tl.exp(-x))
    else:
        # A third of the instructions of a whole element otherwise; 1 / a as rsqrt(a)^2 is off by 3e-7 of its value.
        root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
        return x * root * root
