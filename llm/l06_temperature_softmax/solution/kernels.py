"""Softmax over temperatures in two launches, in Triton: for every call that the cluster's kernel does not take.

The first launch stores the maximum and the sum of exponentials of every part of a row; the second combines them and
reads the row again. Exponentials are powers of two of an element's distance to the maximum of its part:

    e = 2^((x - m) * scale),  scale = log2(e) / t        for t < 0 of -x, with -t
    p = e * 2^((m - M) * scale) / L,  L = sum of l * 2^((m - M) * scale)        over the parts of a row

So nothing overflows, and x / t is never rounded: only its distance to the maximum is.
"""

import triton
import triton.language as tl

from kda_runtime.triton_rows import follow_the_kernel_ahead


@triton.jit
def scale_and_sign(temperatures, row, STRIDE: tl.constexpr):
    """A positive factor for distances and a sign for logits, of one row; without temperatures t is 1."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    LARGEST: tl.constexpr = 3.4028234663852886e38  # of float32
    if temperatures is None:
        return LOG2_E, 1.0
    else:
        t = tl.load(temperatures + row * STRIDE).to(tl.float32)
        sign = tl.where(t < 0, -1.0, 1.0)
        scale = tl.full((), LOG2_E, tl.float32) / (t * sign)
        scale = tl.where(scale > LARGEST, LARGEST, scale)
        return tl.where(t == 0, float("nan"), scale), sign


@triton.jit
def largest_and_sum(x, inside, scale):
    """Maximum of a part's elements, and the sum of their exponentials; -inf and 0 where there are none."""
    largest = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.where(inside, tl.exp2((x - base) * scale), 0.0), axis=0)


@triton.jit(do_not_specialize=["rows"])
def parts_kernel(
    partials,  # [2, ROWS * PARTS]: maxima, then sums
    logits,  # [ROWS, N]
    temperatures,  # [ROWS, 1], one for all, or None
    rows,
    N: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    T_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: maximum and sum of one part of a row."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    follow_the_kernel_ahead(PDL, EARLY=True)

    x = tl.load(logits + row * ROW_STRIDE + col, mask=col < N, other=0.0).to(tl.float32)
    scale, sign = scale_and_sign(temperatures, row, T_STRIDE)

    largest, total = largest_and_sum(x * sign, col < N, scale)

    tl.store(partials + tl.program_id(0), largest)
    tl.store(partials + rows * PARTS + tl.program_id(0), total)


@triton.jit(do_not_specialize=["rows"])
def probabilities_kernel(
    p,  # [ROWS, N]
    partials,  # from `parts_kernel`
    logits,
    temperatures,
    rows,
    N: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    T_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,  # PARTS or more, a power of two
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: the probabilities of one part of a row."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]

    # No need to wait for the launch ahead: it only reads logits, and it began after their writer had ended.
    x = tl.load(logits + row * ROW_STRIDE + col, mask=col < N, other=0.0).to(tl.float32)
    scale, sign = scale_and_sign(temperatures, row, T_STRIDE)
    follow_the_kernel_ahead(PDL)
    part = tl.arange(0, SLOTS)  # [SLOTS]
    line = partials + row * PARTS + part
    m = tl.load(line, mask=part < PARTS, other=float("-inf"))
    sums = tl.load(line + rows * PARTS, mask=part < PARTS, other=0.0)

    largest = tl.max(m, axis=0)
    total = tl.sum(tl.where(sums == 0, 0.0, sums * tl.exp2((m - largest) * scale)), axis=0)
    y = tl.exp2((x * sign - largest) * scale) / total

    tl.store(p + row * N + col, y, mask=col < N, cache_modifier=STORE)
