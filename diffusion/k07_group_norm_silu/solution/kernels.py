"""The Triton kernels: `whole` has a group in one program, all others have a group in many.

`statistics` takes those of parts, and `output` or `flow` writes behind it: `output` when all statistics are there,
`flow` while it takes the rest of them itself. `hold` takes them all, and reads x once.

All take x as a row of groups, each of N = group_channels * S elements one after the other, S of them (the spatial
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
    FAST: tl.constexpr,  # 16 bits: weight and bias in one multiplication and addition, SiLU by approximations
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
        weights, biases = _scaled(affine[tile][0], affine[tile][1], mean, scale, FAST)
        _write(y, values[tile], mean, weights, biases, 0, tile, N, BLOCK, FULL, V, STORE, FAST)


@triton.jit(do_not_specialize=["total", "parts", "head"])
def statistics_kernel(
    partials,  # [total, parts] int64: mean and centred squares of every part, packed; with SLOTS one more, the ticket
    x,  # [total, N]
    N,
    total,  # groups of all batches
    parts,  # programs of a group
    head,  # parts that are taken, of all groups in their order
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a part
    FULL: tl.constexpr,
    V: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,  # tell the cache to keep x for its second reading, and to let it go behind it
    SLOTS: tl.constexpr,  # other entries of `partials` that a program initialises for `flow_kernel`
):
    """One program: the statistics of one part."""
    part, group = tl.program_id(0), _second()
    # Whatever wrote x has to end first, and whatever used the memory of `partials`.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = group.to(tl.int64) * parts + part
    if (place < head) & (group < total):
        begin = part * (BLOCK * TILES)
        EVICT: tl.constexpr = "evict_last" if HINTS else ""
        values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, EVICT)
        mean, squares = _moments(values, begin, N, BLOCK, TILES, FULL, V)
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
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,  # no part has elements of more than two channels
    PARTS: tl.constexpr,  # `parts`, or the next power of two
    REVERSE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,
    STORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program: the output of one part."""
    part, group = tl.program_id(0), _second()
    if REVERSE:  # back to front: what was read last is what the cache still has
        part = parts - 1 - part
        group = tl.num_programs(1) * tl.num_programs(2) - 1 - group
    # This launch begins when every program of the one before has come past its own wait, so x is there: only
    # `partials`, which other programs wrote, has to be waited for.
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if group < total:
        begin = part * (BLOCK * TILES)
        values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, "evict_first" if HINTS else "")
        first_channel = _first_channel(group, groups, group_channels)
        weight += first_channel
        bias += first_channel
        near = _quotient(begin, S)
        affine = ()
        if not TWO:
            affine = _affines(weight, bias, near, begin, N, S, group_channels, BLOCK, TILES, FULL, V, TWO)
        if PDL and EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if TWO:  # one trip to memory with the partial results; earlier loads were waited for before it began
            affine = _affines(weight, bias, near, begin, N, S, group_channels, BLOCK, TILES, FULL, V, TWO)
        # 32 parts at a time, or a quarter of many: what a warp adds alone takes no shared memory and no barrier. With
        # an eighth at a time the kernel took more than 80 registers, and a third block had no room.
        WIDE: tl.constexpr = PARTS // 4 if PARTS > 128 else min(PARTS, 32)
        partials += group.to(tl.int64) * parts
        first = tl.load(partials)
        words = _words(partials, parts, PARTS, WIDE, False)
        common = _unpacked(first)[0]
        mean, squares = _combine(words, common, N, parts, BLOCK * TILES, FULL == TILES, PARTS, WIDE)
        scale = tl.rsqrt(squares / N + EPS)
        y += group.to(tl.int64) * N
        _finish(y, values, affine, mean, scale, near, begin, N, S, BLOCK, TILES, FULL, V, TWO, STORE, FAST)


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
    head,  # parts whose statistics the launch before has taken: those of the first group and more
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    REVERSE: tl.constexpr,
    PDL: tl.constexpr,
    HINTS: tl.constexpr,
    STORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """The output of all parts, and `head` parts ahead of it the statistics: programs take the ticket that is next.

    Ticket t is the statistics of part head + t, if there is one, and then the output of part t, which waits until all
    parts of its group have their statistics. They are single words that say themselves whether they are there, so that
    nothing else has to be ordered.

    It cannot hang as long as programs that have begun go on, however many there are and whenever others begin: an
    output waits only for statistics of lower tickets, which wait for nothing, and a program works off its tickets in
    ascending order, so that the lowest one which is not done never waits for long. So a program may take its next
    ticket early.
    """
    LAST: tl.constexpr = "evict_last" if HINTS else ""
    FIRST: tl.constexpr = "evict_first" if HINTS else ""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    every = total * parts
    ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)
    while ticket < every:
        place = ticket
        if place + head < every:
            group = _quotient(place + head, parts)
            begin = (place + head - group * parts) * (BLOCK * TILES)
            values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, LAST)
            ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)  # on its way together with x
            mean, squares = _moments(values, begin, N, BLOCK, TILES, FULL, V)
            tl.atomic_xchg(partials + place + head, _packed(mean, squares), sem="relaxed")
        else:
            ticket = tl.atomic_add(partials + every, 1, sem="relaxed").to(tl.int32)
        group = _quotient(place, parts)
        part = place - group * parts
        if REVERSE:  # back to front: what was read last is what the cache still has
            part = parts - 1 - part
        begin = part * (BLOCK * TILES)
        values = _load(x + group.to(tl.int64) * N, begin, N, BLOCK, TILES, FULL, V, FIRST)
        channel = _first_channel(group, groups, group_channels)
        near = _quotient(begin, S)
        affine = _affines(
            weight + channel, bias + channel, near, begin, N, S, group_channels, BLOCK, TILES, FULL, V, TWO
        )
        common, words = _awaited(partials + group * parts, parts, PARTS, THREADS)
        WIDE: tl.constexpr = max(PARTS, THREADS)
        mean, squares = _combine(words, common, N, parts, BLOCK * TILES, FULL == TILES, WIDE, WIDE)
        scale = tl.rsqrt(squares / N + EPS)
        rows = y + group.to(tl.int64) * N
        _finish(rows, values, affine, mean, scale, near, begin, N, S, BLOCK, TILES, FULL, V, TWO, STORE, FAST)


@triton.jit(do_not_specialize=["count"])
def fresh_kernel(partials, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """What `hold_kernel` has to find: no part has statistics."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Whatever used the memory of `partials` has to end.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(partials + place, tl.full((BLOCK,), -1, tl.int64), mask=place < count)


@triton.jit(do_not_specialize=["S", "groups", "group_channels", "total", "parts"])
def hold_kernel(
    y,  # [total, N]
    x,  # [total, N]
    weight,  # [groups * group_channels]
    bias,  # [groups * group_channels]
    partials,  # [2 * total * parts] int64: statistics as above, then for parts left for later the one left before
    N,
    S,
    groups,
    group_channels,
    total,
    parts,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    PATIENCE: tl.constexpr,  # so often a thread looks for a part's statistics
    SPIN: tl.constexpr,  # look by a loop of instructions; without, once
    STAGES: tl.constexpr,  # parts on their way to shared memory, and one more
    PDL: tl.constexpr,
    STORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Statistics and output of all parts; a part stays in registers, and x is read once.

    Program p takes parts p, p + programs, ...: it says a part's statistics and writes the part before, whose group has
    them by now where all programs are at work. Where they are not, because something else is on the GPU, programs lose
    patience and leave parts for later; then they take what statistics are still missing themselves, to the same bits.
    So nobody waits for a program that has not begun.
    """
    every = total * parts
    later = partials + every
    programs = tl.num_programs(0)
    left = tl.full((), -1, tl.int32)
    patience = tl.full((), PATIENCE, tl.int32)
    held = ()
    for tile in tl.static_range(TILES):  # noqa: B007
        held += (tl.zeros((BLOCK // V, V), x.dtype.element_ty),)
    common = tl.full((), 0.0, tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for place in tl.range(tl.program_id(0), every + programs, programs, num_stages=STAGES):
        group, begin, end = _place(place, N, parts, every, BLOCK, TILES)
        fresh = _load(x + group.to(tl.int64) * N, begin, end, BLOCK, TILES, 0, V, "")
        mean, squares = _moments_at_once(fresh, begin, N, BLOCK, TILES, FULL, V)
        tl.atomic_xchg(partials + place, _packed(mean, squares), mask=place < every, sem="relaxed")
        here = place - programs
        if here >= 0:
            words = _seen(partials, here, parts, patience, PARTS, THREADS, SPIN)
            missing, group_mean, scale = _group(
                words, common, N, parts, EPS, BLOCK * TILES, FULL == TILES, PARTS, THREADS
            )
            if missing == 0:
                _output_of(
                    y,
                    weight,
                    bias,
                    held,
                    here,
                    group_mean,
                    scale,
                    N,
                    S,
                    groups,
                    group_channels,
                    parts,
                    BLOCK,
                    TILES,
                    FULL,
                    V,
                    TWO,
                    STORE,
                    FAST,
                )
            else:
                tl.store(later + here, left.to(tl.int64))
                left = here
                patience = tl.full((), 1, tl.int32)
        held = fresh
        common = mean
    while left >= 0:
        first = _quotient(left, parts) * parts
        part = 0
        while part < parts:
            group, begin, end = _place(first + part, N, parts, every, BLOCK, TILES)
            # All threads have to see the same of it.
            word = tl.load(partials + (first + part) + tl.zeros((THREADS,), tl.int32), volatile=True)
            if tl.min((word >> 32).to(tl.int32), axis=0) < 0:
                fresh = _load(x + group.to(tl.int64) * N, begin, end, BLOCK, TILES, 0, V, "")
                mean, squares = _moments_at_once(fresh, begin, N, BLOCK, TILES, FULL, V)
                tl.atomic_xchg(partials + (first + part), _packed(mean, squares), sem="relaxed")
            part += 1
        group, begin, end = _place(left, N, parts, every, BLOCK, TILES)
        values = _load(x + group.to(tl.int64) * N, begin, end, BLOCK, TILES, 0, V, "")
        mean, squares = _moments_at_once(values, begin, N, BLOCK, TILES, FULL, V)
        missing = tl.full((), 1, tl.int32)
        group_mean = mean
        scale = mean
        while missing != 0:  # threads may see the last of them at different times
            words = _seen(partials, left, parts, 1, PARTS, THREADS, SPIN)
            missing, group_mean, scale = _group(
                words, mean, N, parts, EPS, BLOCK * TILES, FULL == TILES, PARTS, THREADS
            )
        _output_of(
            y,
            weight,
            bias,
            values,
            left,
            group_mean,
            scale,
            N,
            S,
            groups,
            group_channels,
            parts,
            BLOCK,
            TILES,
            FULL,
            V,
            TWO,
            STORE,
            FAST,
        )
        left = tl.load(later + left, volatile=True).to(tl.int32)


@triton.jit
def _place(place, N, parts, every, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Of a part, counted through all groups: its group, where in it the part begins, and where the group ends.

    Behind the last part that is 0, and nothing is loaded.
    """
    group = _quotient(tl.minimum(place, every - 1), parts)
    return group, (place - group * parts) * (BLOCK * TILES), tl.where(place < every, N, 0)


@triton.jit
def _output_of(
    y,
    weight,
    bias,
    values,
    place,
    mean,
    scale,
    N,
    S,
    groups,
    group_channels,
    parts,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
    STORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write the output of a part, counted through all groups."""
    group = _quotient(place, parts)
    begin = (place - group * parts) * (BLOCK * TILES)
    channel = _first_channel(group, groups, group_channels)
    near = _quotient(begin, S)
    affine = _affines(weight + channel, bias + channel, near, begin, N, S, group_channels, BLOCK, TILES, FULL, V, TWO)
    rows = y + group.to(tl.int64) * N
    _finish(rows, values, affine, mean, scale, near, begin, N, S, BLOCK, TILES, FULL, V, TWO, STORE, FAST)


@triton.jit
def _moments_at_once(tiles, begin, N, BLOCK: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr, V: tl.constexpr):
    """As `_moments`, by one reduction across threads: each row's own mean first, then Chan's formula."""
    total = tiles[0].to(tl.float32)
    for tile in tl.static_range(1, TILES):
        total += tiles[tile].to(tl.float32)
    counts = tl.zeros((BLOCK // V,), tl.float32)
    for tile in tl.static_range(TILES):
        row = begin + tile * BLOCK + tl.arange(0, BLOCK // V) * V
        counts += tl.where(row < N, V, 0).to(tl.float32) if tile >= FULL else tl.full((BLOCK // V,), V, tl.float32)
    means = tl.sum(total, axis=1) / tl.maximum(counts, 1.0)
    squares = tl.zeros_like(total)
    for tile in tl.static_range(TILES):
        centred = tiles[tile].to(tl.float32) - means[:, None]
        if tile >= FULL:
            centred = tl.where(_places(begin, tile, BLOCK, V)[0] < N, centred, 0.0)
        squares += centred * centred
    mean, squares, _ = tl.reduce((means, tl.sum(squares, axis=1), counts), 0, _merged)
    return mean, squares


@triton.jit
def _merged(mean, squares, count, other_mean, other_squares, other_count):
    """Chan's formula: mean, centred squares and number of both."""
    both = count + other_count
    share = other_count / tl.maximum(both, 1.0)
    apart = other_mean - mean
    return mean + apart * share, squares + other_squares + apart * apart * (count * share), both


@triton.jit
def _seen(partials, place, parts, patience, PARTS: tl.constexpr, THREADS: tl.constexpr, SPIN: tl.constexpr):
    """The words of a part's group, 0 behind the last one; negative where there is none after so many looks."""
    WIDE: tl.constexpr = max(PARTS, THREADS)
    part = tl.arange(0, WIDE)
    at = partials + (_quotient(place, parts) * parts + tl.minimum(part, parts - 1))
    if SPIN:
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred there, again;
            .reg .b32 left;
            mov.b32 left, $2;
            LOOK:
            ld.volatile.global.b64 $0, [$1];
            setp.ge.s64 there, $0, 0;
            sub.s32 left, left, 1;
            setp.gt.s32 again, left, 0;
            @there bra DONE;
            @again bra LOOK;
            DONE:
            }""",
            "=l,l,r",
            [at.to(tl.int64), patience],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.load(at, volatile=True)
    return tl.where(part < parts, words, 0)


@triton.jit
def _group(
    words,
    common,
    N,
    parts,
    EPS: tl.constexpr,
    PART: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Of a group: how many parts have no statistics yet, and with all of them its mean and inverse deviation.

    By one reduction: sums relative to `common`, the mean of a part of the group. What cancels is at most the number of
    parts times what is left, since that part itself is in the sum.
    """
    WIDE: tl.constexpr = max(PARTS, THREADS)
    part = tl.arange(0, WIDE)
    held = tl.full((WIDE,), PART, tl.int32) if EVEN else tl.minimum(N - part * PART, PART)
    counts = tl.where(part < parts, held, 0).to(tl.float32)
    means, squares = _unpacked(words)
    apart = tl.where(part < parts, means - common, 0.0)
    moved, spread, missing = tl.reduce(
        (counts * apart, squares + counts * apart * apart, tl.where(words < 0, 1, 0)), 0, _added
    )
    shift = moved / N
    return missing, common + shift, tl.rsqrt(tl.maximum(spread - moved * shift, 0.0) / N + EPS)


@triton.jit
def _added(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _second():
    """The number of a program in the second and third dimension of a grid: neither reaches beyond 65535."""
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)


@triton.jit
def _packed(mean, squares):
    """Mean and centred squares as one natural number, which is stored and loaded as a whole."""
    low = mean.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return ((squares.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32) | low  # a NaN may have a sign


@triton.jit
def _unpacked(word):
    """The mean and the centred squares."""
    return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _words(partials, parts, PARTS: tl.constexpr, WIDE: tl.constexpr, VOLATILE: tl.constexpr):
    """Those of the parts of a group, WIDE at a time, 0 behind the last one."""
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
    """The words of a group, as soon as they are all there, and the mean of its first part.

    Threads may see a word at different times, and have to agree on when to go on. So each has words of its own, and its
    own sight of the first one, and all of that is in the minimum.
    """
    WIDE: tl.constexpr = max(PARTS, THREADS)
    words = _words(partials, parts, WIDE, WIDE, True)
    first = tl.load(partials, volatile=True)
    while tl.min((tl.minimum(words[0], first) >> 32).to(tl.int32), axis=0) < 0:
        words = _words(partials, parts, WIDE, WIDE, True)
        first = tl.load(partials, volatile=True)
    return _unpacked(first)[0], words


@triton.jit
def _affines(
    weight,
    bias,
    near,  # the channel with which the part begins
    begin,
    N,
    S,
    group_channels,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
):
    """Weight and bias of a part, tile for tile, or of the two channels that it may have elements of."""
    if TWO:
        far = tl.minimum(near + 1, group_channels - 1)
        return (tl.load(weight + near), tl.load(bias + near)), (tl.load(weight + far), tl.load(bias + far))
    else:
        affine = ()
        for tile in tl.static_range(TILES):
            affine += (_affine(weight, bias, begin, tile, N, S, BLOCK, FULL, V),)
        return affine


@triton.jit
def _finish(
    y,
    values,
    affine,
    mean,
    scale,
    near,
    begin,
    N,
    S,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,
    V: tl.constexpr,
    TWO: tl.constexpr,
    STORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """The output of a part, which begins at element `begin` of its group."""
    if TWO:
        border = (near + 1) * S  # where the far channel begins
        near_weight, near_bias = _scaled(affine[0][0], affine[0][1], mean, scale, FAST)
        far_weight, far_bias = _scaled(affine[1][0], affine[1][1], mean, scale, FAST)
    for tile in tl.static_range(TILES):
        if TWO:
            is_near = _places(begin, tile, BLOCK, V)[0] < border
            weights, biases = tl.where(is_near, near_weight, far_weight), tl.where(is_near, near_bias, far_bias)
        else:
            weights, biases = _scaled(affine[tile][0], affine[tile][1], mean, scale, FAST)
        _write(y, values[tile], mean, weights, biases, begin, tile, N, BLOCK, FULL, V, STORE, FAST)


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
def _combine(
    words,
    common,
    N,
    parts,
    PART: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Mean and sum of centred squares of a group from those of its parts; EVEN: each of them has PART elements.

    Means are taken relative to `common`, the first one, so that what they have in common costs no digits.
    """
    counts = ()
    for begin in tl.static_range(0, PARTS, WIDE):
        if begin + WIDE <= PARTS // 2:
            counts += (tl.full((WIDE,), PART, tl.float32),)
        else:
            part = begin + tl.arange(0, WIDE)
            held = PART if EVEN else tl.minimum(N - part * PART, PART)
            counts += (tl.where(part < parts, held, 0).to(tl.float32),)
    moved = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        moved += counts[chunk] * (_unpacked(words[chunk])[0] - common)
    mean = tl.sum(moved, axis=0) / N
    spread = tl.zeros((WIDE,), tl.float32)
    for chunk in tl.static_range(PARTS // WIDE):
        centred = (_unpacked(words[chunk])[0] - common) - mean
        spread += _unpacked(words[chunk])[1] + counts[chunk] * centred * centred
    return common + mean, tl.sum(spread, axis=0)


@triton.jit
def _scaled(weight, bias, mean, scale, FAST: tl.constexpr):
    """Weight, and what is added behind it, in float32: FAST is for x itself, else for x - mean."""
    weight = weight.to(tl.float32) * scale
    bias = bias.to(tl.float32)
    if FAST:
        bias = tl.fma(-mean, weight, bias)
    return weight, bias


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
    FAST: tl.constexpr,
):
    """Normalise a tile by what `_scaled` gives, SiLU, and store."""
    row, col = _places(begin, tile, BLOCK, V)
    values = values.to(tl.float32)
    normed = (values if FAST else values - mean) * weights + biases
    value = _silu(normed, FAST).to(y.dtype.element_ty)
    if tile < FULL:
        tl.store(y + (row + col), value, cache_modifier=STORE)
    else:
        tl.store(y + (row + col), value, mask=row < N, cache_modifier=STORE)


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
