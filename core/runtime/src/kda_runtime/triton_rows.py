"""Triton device functions for rows of a tensor, held whole in registers, beside operands that broadcast to them.

For kernels that normalise or modulate the last dimension of x. A row of N columns is held as a tuple of chunks
[ROWS, BLOCK]; a chunk is one 16-byte vector of every thread. So N need not be a power of two: 3072 columns are 3 chunks
of 1024. All chunks of a row are loaded before the first use, so that a thread has them in flight together. Loads and
stores are masked only where a row or a column may be outside.

Parameters: `col`, [1, BLOCK], are column indices (those of the first chunk, where a chunk's number is given too);
`inside`, [ROWS, 1], says which rows exist, None if all do; CACHE is a cache modifier. Elements outside read as 0. No
parameter has a default: Triton 3.6 takes no strings there. Where an operand's lines lie is a `broadcast.Form`, a
constant of the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR_BYTES = 16
"""Size of the widest load or store of a thread."""


def vector_width(warps: int, item_size: int) -> int:
    """Elements that the threads of so many warps hold with one vector each."""
    return warps * 32 * VECTOR_BYTES // item_size


def even_share(total: int, most: int) -> int:
    """Size of a share if `total` is cut evenly into as few as possible of at most `most`: 4, at most 3, is 2 + 2."""
    shares = -(-total // most)
    return -(-total // shares)


@triton.jit  # type: ignore[untyped-decorator]
def follow_the_kernel_ahead(PDL: tl.constexpr, EARLY: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """With programmatic dependent launch: wait until the previous kernel has ended. Nothing may be read before.

    The next kernel is set up as this one's programs end, or with EARLY at once. Its programs then occupy the GPU while
    they wait, so EARLY is for kernels that are followed by another kernel of the same op. Without PDL a kernel begins
    after the previous one has ended: it need not wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()


# --- rows in registers


@triton.jit
def widen(value):  # type: ignore[no-untyped-def]
    """The loaded value in float32: as `.to(tl.float32)` for every bit pattern, with fewer instructions.

    A register holds two bfloat16. The compiler turns `.to` into a shift for the low one, and a PRMT and a shift for the
    high one; written with integers, the high one is one AND. Compiled for sm_90a, k05 on rows of 3072 columns has 324
    instructions instead of 363, and with gate and residual 481 instead of 535 and 64 registers instead of 72.

    All uses of a value have to widen it in the same way: the compiler does not merge different conversions (with this
    in `statistics` alone: 431). Do not use it where the compiler could compute in bfloat16: x + residual, rounded to
    bfloat16, is one HADD2 for two elements with `.to`, but not with this (603 -> 694 for a row of 5120 columns).
    """
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def load_chunk(  # type: ignore[no-untyped-def]
    line, col, inside, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """A chunk of the rows that start at `line`, [ROWS, 1] or one for all."""
    return load_tile(line, chunk * BLOCK + col, inside, N, (chunk + 1) * BLOCK > N, CACHE)


@triton.jit  # type: ignore[untyped-decorator]
def load_row(line, col, inside, N: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """All chunks of the rows that start at `line`, as a tuple; empty where `line` is None."""
    chunks = ()
    if line is not None:
        for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
            chunks += (load_chunk(line, col, inside, chunk, N, BLOCK, CACHE),)  # type: ignore[assignment]
    return chunks


@triton.jit  # type: ignore[untyped-decorator]
def store_chunk(  # type: ignore[no-untyped-def]
    line, value, col, inside, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """The counterpart of `load_chunk`; rounds `value` to the dtype stored."""
    store_tile(line, value, chunk * BLOCK + col, inside, N, (chunk + 1) * BLOCK > N, CACHE)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(line, col, inside, N: tl.constexpr, PARTIAL: tl.constexpr, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Any columns `col` of the rows that start at `line`; PARTIAL: some may be beyond N.

    CACHE is a cache modifier, or `evict_first`: what is loaded leaves the L2 before other data do.
    """
    POLICY: tl.constexpr = CACHE if CACHE == "evict_first" else ""
    MODIFIER: tl.constexpr = "" if CACHE == "evict_first" else CACHE
    if PARTIAL:
        if inside is None:
            return tl.load(line + col, mask=col < N, other=0.0, cache_modifier=MODIFIER, eviction_policy=POLICY)
        else:
            near = (col < N) & inside
            return tl.load(line + col, mask=near, other=0.0, cache_modifier=MODIFIER, eviction_policy=POLICY)
    elif inside is None:
        return tl.load(line + col, cache_modifier=MODIFIER, eviction_policy=POLICY)
    else:
        return tl.load(line + col, mask=inside, other=0.0, cache_modifier=MODIFIER, eviction_policy=POLICY)


@triton.jit  # type: ignore[untyped-decorator]
def store_tile(line, value, col, inside, N: tl.constexpr, PARTIAL: tl.constexpr, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The counterpart of `load_tile`; rounds `value` to the dtype stored."""
    place = line + col
    if PARTIAL:
        if inside is None:
            tl.store(place, value, mask=col < N, cache_modifier=CACHE)
        else:
            tl.store(place, value, mask=(col < N) & inside, cache_modifier=CACHE)
    elif inside is None:
        tl.store(place, value, cache_modifier=CACHE)
    else:
        tl.store(place, value, mask=inside, cache_modifier=CACHE)


@triton.jit  # type: ignore[untyped-decorator]
def statistics(  # type: ignore[no-untyped-def]
    chunks,  # of the rows, [ROWS, BLOCK] each, any dtype, 0 beyond N
    col,  # [1, BLOCK], of the first chunk
    EPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Mean (0 for RMSNorm) and 1 / sqrt(mean((x - mean)^2) + eps) of every row, [ROWS, 1] float32.

    Two passes over registers, never mean(x^2) - mean(x)^2, which loses its digits where the mean is large. EXACT adds
    the mean of the centred values to the mean, and corrects the squares for it: then the mean is good to its last
    digit, even where the row's sum is not. Without EXACT a mean of values around 64 is off by 1e-5, which only float32
    outputs show.
    """
    # Chunks are added element by element first: then a statistic takes one reduction across threads, of short sums.
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    mean = 0.0
    if not RMS:
        total = widen(chunks[0])  # [ROWS, BLOCK]
        for chunk in tl.static_range(1, CHUNKS):
            total += widen(chunks[chunk])
        # The mean is corrected by its remainder: if it is large beside the deviation, its last digit decides the error
        # of the result. A correctly rounded division does the same, with a branch and a call.
        total = tl.sum(total, axis=1, keep_dims=True)
        mean = total * (1.0 / N)
        mean = tl.fma(tl.fma(mean, -1.0 * N, total), 1.0 / N, mean)
    squares = tl.zeros_like(widen(chunks[0]))
    rest = tl.zeros_like(squares)
    for chunk in tl.static_range(CHUNKS):
        if RMS:
            centred = widen(chunks[chunk])
        else:
            centred = _centred(chunks[chunk], mean, chunk * BLOCK + col, N, (chunk + 1) * BLOCK > N)
        squares += centred * centred
        if EXACT and not RMS:
            rest += centred
    square = tl.sum(squares, axis=1, keep_dims=True)
    if EXACT and not RMS:
        total = tl.sum(rest, axis=1, keep_dims=True)
        mean += total * (1.0 / N)
        square -= total * total * (1.0 / N)
    return mean, tl.rsqrt(square * (1.0 / N) + EPS)


@triton.jit  # type: ignore[untyped-decorator]
def _centred(values, mean, col, N: tl.constexpr, PARTIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk without its row's mean, 0 beyond N."""
    centred = widen(values) - mean
    if PARTIAL:
        centred = tl.where(col < N, centred, 0.0)
    return centred


@triton.jit  # type: ignore[untyped-decorator]
def affine(value, weight, bias, col, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk in float32 times weight plus bias, [N] each, loaded here; either may be None."""
    if weight is not None:
        value *= widen(load_chunk(weight, col, None, chunk, N, BLOCK, ""))
    if bias is not None:
        value += widen(load_chunk(bias, col, None, chunk, N, BLOCK, ""))
    return value


@triton.jit  # type: ignore[untyped-decorator]
def norm_chunk(values, chunk: tl.constexpr, mean, inverse, weights, biases):  # type: ignore[no-untyped-def]
    """A chunk of the rows `values`, normalised with their `statistics`; empty tuples mean no weight or bias."""
    value = (widen(values[chunk]) - mean) * inverse
    if len(weights) > 0:
        value *= widen(weights[chunk])
    if len(biases) > 0:
        value += widen(biases[chunk])
    return value


# --- operands that broadcast to rows


@triton.jit  # type: ignore[untyped-decorator]
def operand_line(operand, row, group, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the operand's lines for these rows of x ([ROWS, 1]) start: [ROWS, 1], or the operand itself (`one`)."""
    if FORM.name == "one":
        return operand
    else:
        line = row
        if FORM.name == "groups":
            line = row // group
        if FORM.name == "cycle":
            line = row % group
        return operand + line.to(tl.int64) * FORM.stride


@triton.jit  # type: ignore[untyped-decorator]
def load_operand_chunk(  # type: ignore[no-untyped-def]
    line,  # from `operand_line`
    col,
    inside,
    chunk: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):
    """A chunk of an operand, as it is stored: [1 or ROWS, 1 or BLOCK], or one value."""
    return load_operand_tile(line, chunk * BLOCK + col, inside, N, (chunk + 1) * BLOCK > N, FORM)


@triton.jit  # type: ignore[untyped-decorator]
def load_operand_tile(  # type: ignore[no-untyped-def]
    line, col, inside, N: tl.constexpr, PARTIAL: tl.constexpr, FORM: tl.constexpr
):
    """The same for any columns `col`; see `load_tile`."""
    if FORM.name == "one":
        if FORM.across:
            return load_tile(line, col, None, N, PARTIAL, "")
        else:
            return tl.load(line)
    elif FORM.across:
        return load_tile(line, col, inside, N, PARTIAL, "")
    elif inside is None:
        return tl.load(line)
    else:
        return tl.load(line, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def load_operand_row(  # type: ignore[no-untyped-def]
    line, col, inside, N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """All chunks of an operand, as a tuple; empty where `line` is None. One value for all columns is loaded once."""
    chunks = ()
    if line is not None:
        value = load_operand_chunk(line, col, inside, 0, N, BLOCK, FORM)
        for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
            if FORM.across and chunk > 0:
                value = load_operand_chunk(line, col, inside, chunk, N, BLOCK, FORM)
            chunks += (value,)  # type: ignore[assignment]
    return chunks
