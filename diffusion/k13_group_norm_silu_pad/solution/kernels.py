"""The Triton kernels: statistics of channels in stretches of pixels, of groups, and the output; a sum with biases.

A pixel is C neighbouring elements. A tile is [ROWS, BLOCK]: pixels, and channels with BLOCK the power of two from C on.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kda_runtime.triton_rows import follow_the_kernel_ahead, widen
from kda_runtime.triton_silu import silu_times


class Form(NamedTuple):
    """What is fixed by the layer, constants of the kernel."""

    frames: int
    """Frames before the first one; lines and columns at either side follow."""
    height: int
    width: int
    up_frames: int
    """Factors of the upsampling."""
    up_space: int


@triton.jit(do_not_specialize=["pixels", "length"])
def channels_kernel(
    parts,  # [B, stretches, 3, C] float32: mean of a channel in a stretch, its rest, and centred squares
    x,  # [B, pixels, C]
    pixels,
    length,  # pixels of a stretch, a multiple of ROWS * TILES
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,  # that are loaded at a time
    PDL: tl.constexpr,
):
    """One program: one stretch of pixels.

    Sums are relative to the mean of the stretch's first tiles, so that little cancels in S2 - S1^2 / n.
    """
    stretch, batch = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, BLOCK)[None, :]
    first = stretch * length
    left = tl.minimum(pixels - first, length)
    x += (batch.to(tl.int64) * pixels + first) * C
    # What wrote x has ended when the next kernel begins, since this one has waited for it.
    follow_the_kernel_ahead(PDL, EARLY=True)
    tiles = _tiles(x, 0, left, channel, C, BLOCK, ROWS, TILES)
    common = widen(tiles[0])
    for tile in tl.static_range(1, TILES):
        common += widen(tiles[tile])
    common = tl.sum(common, axis=0, keep_dims=True) / tl.minimum(left, ROWS * TILES).to(tl.float32)
    moved = tl.zeros((ROWS, BLOCK), tl.float32)
    moved, squares = _summed(tiles, moved, moved, common, 0, left, ROWS, TILES)
    for begin in tl.range(ROWS * TILES, left, ROWS * TILES):
        tiles = _tiles(x, begin, left, channel, C, BLOCK, ROWS, TILES)
        moved, squares = _summed(tiles, moved, squares, common, begin, left, ROWS, TILES)
    shift = tl.sum(moved, axis=0, keep_dims=True)
    apart = shift / left.to(tl.float32)
    squares = _natural(tl.sum(squares, axis=0, keep_dims=True) - shift * apart)
    mean, rest = _sum(common, apart)
    parts += (batch.to(tl.int64) * tl.num_programs(0) + stretch) * (3 * C)
    tl.store(parts + channel, mean, mask=channel < C)
    tl.store(parts + C + channel, rest, mask=channel < C)
    tl.store(parts + 2 * C + channel, squares, mask=channel < C)


@triton.jit
def _tiles(x, begin, left, channel, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """The tiles of a stretch from pixel `begin` on, 0 after the stretch's end."""
    row = begin + tl.arange(0, ROWS)[:, None]
    tiles = ()
    for tile in tl.static_range(TILES):
        inside = _inside(row + tile * ROWS < left, channel, C, BLOCK)
        tiles += (tl.load(x + (row + tile * ROWS).to(tl.int64) * C + channel, mask=inside, other=0.0),)
    return tiles


@triton.jit
def _summed(tiles, moved, squares, common, begin, left, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Both sums, element by element, with these tiles."""
    row = begin + tl.arange(0, ROWS)[:, None]
    for tile in tl.static_range(TILES):
        apart = tl.where(row + tile * ROWS < left, widen(tiles[tile]) - common, 0.0)
        moved += apart
        squares += apart * apart
    return moved, squares


@triton.jit
def _sum(a, b):
    """The sum as two float32: a + b rounded, and the rest that rounding left out (Knuth's two-sum)."""
    rounded = a + b
    part = rounded - a
    return rounded, (a - (rounded - part)) + (b - part)


@triton.jit
def _natural(x):
    """Rounding may leave a little less than nothing; a NaN has to stay one."""
    return tl.where(x < 0, 0.0, x)


@triton.jit(do_not_specialize=["pixels", "stretches", "length"])
def groups_kernel(
    affine,  # [B, 3, C] float32: what is subtracted from x, the factor behind it, what is added last
    parts,  # as `channels_kernel` leaves it
    weight,  # [C]
    bias,  # [C]
    x_bias,  # [C], or None: added to x first
    pixels,
    stretches,
    length,  # pixels of a stretch
    EPS: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a group
    WIDE: tl.constexpr,  # power of two from CHANNELS on
    ROWS: tl.constexpr,  # stretches at a time
    PDL: tl.constexpr,
):
    """One program: one group of one batch.

    Means are added relative to the first one, so an offset costs no digits. One float32 would not hold the group's mean
    well enough where few elements are close to each other and far from 0: what it leaves out goes into the last term.
    """
    group, batch = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, WIDE)[None, :]
    parts += batch.to(tl.int64) * stretches.to(tl.int64) * (3 * C) + group * CHANNELS
    to = affine + batch * (3 * C) + group * CHANNELS + channel
    own = channel < CHANNELS
    follow_the_kernel_ahead(PDL, EARLY=True)
    factor = widen(tl.load(weight + group * CHANNELS + channel, mask=own, other=0.0))
    last = widen(tl.load(bias + group * CHANNELS + channel, mask=own, other=0.0))
    common = tl.load(parts)
    added = tl.zeros((1, WIDE), tl.float32)  # to a channel, more than to the first one
    if x_bias is not None:
        added += widen(tl.load(x_bias + group * CHANNELS + channel, mask=own, other=0.0))
        added -= widen(tl.load(x_bias + group * CHANNELS))
    moved = tl.zeros((ROWS, WIDE), tl.float32)
    squares = tl.zeros((ROWS, WIDE), tl.float32)
    for begin in tl.range(0, stretches, ROWS):
        stretch = begin + tl.arange(0, ROWS)[:, None]
        inside = (stretch < stretches) & own
        place = parts + stretch.to(tl.int64) * (3 * C) + channel
        apart = tl.load(place, mask=inside, other=0.0) - common
        apart += tl.load(place + C, mask=inside, other=0.0) + added
        spread = tl.load(place + 2 * C, mask=inside, other=0.0)
        count = tl.where(inside, tl.minimum(pixels - stretch * length, length), 0).to(tl.float32)
        moved += count * apart
        squares += spread + count * apart * apart
    elements = pixels.to(tl.float32) * CHANNELS
    shift = tl.sum(tl.sum(moved, axis=1), axis=0) / elements
    total = tl.sum(tl.sum(squares, axis=1), axis=0)
    factor *= 1.0 / tl.sqrt(_natural(total / elements - shift * shift) + EPS)
    mean, rest = _sum(common, shift - added)
    tl.store(to, mean, mask=own)
    tl.store(to + C, factor, mask=own)
    tl.store(to + 2 * C, last - rest * factor, mask=own)


@triton.jit
def _inside(rows, channel, C: tl.constexpr, BLOCK: tl.constexpr):
    """Where a tile has elements: in the rows of the mask `rows`, [ROWS, 1], and in C channels."""
    if C == BLOCK:
        return rows
    else:
        return rows & (channel < C)


SIZES = ["t", "h", "w", "lines", "columns"]
"""Arguments of the kernel with which nothing is compiled again."""


@triton.jit(do_not_specialize=SIZES)
def pixels_kernel(
    y,  # [B, frames, lines, columns, C]
    x,  # [B, t, h, w, C]
    affine,  # as `groups_kernel` leaves it, or None: the output is a copy
    t,
    h,
    w,
    lines,  # of a frame of y
    columns,
    FORM: tl.constexpr,  # a `Form`
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # pixels of a program
    FAST: tl.constexpr,  # SiLU by approximations
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: ROWS neighbouring pixels of one line of y."""
    line = tl.program_id(1)
    frames = FORM.frames + 1 + (t - 1) * FORM.up_frames
    batch, frame = tl.program_id(2) // frames, tl.program_id(2) % frames
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = _inside(column < columns, channel, C, BLOCK)
    # All pixels of a program are of one line, so only columns are per row of the tile.
    source = tl.maximum(frame - FORM.frames, 0) + (FORM.up_frames - 1)
    source = (batch * t + source // FORM.up_frames).to(tl.int64) * h
    above = tl.minimum(tl.maximum(line - FORM.height, 0), h * FORM.up_space - 1) // FORM.up_space
    left = tl.minimum(tl.maximum(column - FORM.width, 0), w * FORM.up_space - 1)
    left = (left.to(tl.uint32) // FORM.up_space).to(tl.int32)
    x += (source + above) * w * C
    y += ((tl.program_id(2).to(tl.int64) * lines + line) * columns) * C
    if affine is None:
        follow_the_kernel_ahead(PDL)
        value = tl.load(x + left * C + channel, mask=inside)
    else:
        # x is complete: the kernels ahead have waited for what wrote it before they let this one begin.
        value = tl.load(x + left * C + channel, mask=inside, other=0.0)
        follow_the_kernel_ahead(PDL)
        affine += batch * (3 * C) + channel
        mean = tl.load(affine, mask=channel < C, other=0.0)
        factor = tl.load(affine + C, mask=channel < C, other=0.0)
        last = tl.load(affine + 2 * C, mask=channel < C, other=0.0)
        normed = (widen(value) - mean) * factor + last
        value = silu_times(normed, 1.0, FAST).to(y.dtype.element_ty)
    tl.store(y + column * C + channel, value, mask=inside, cache_modifier=STORE)


@triton.jit(do_not_specialize=["pixels"])
def sum_kernel(
    y,  # [pixels, C]
    x,  # [pixels, C]
    bias,  # [C]
    residual,  # [pixels, C], or None
    residual_bias,  # [C], or None
    pixels,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # pixels of a program
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: ROWS neighbouring pixels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64) * C + channel
    inside = _inside(row < pixels, channel, C, BLOCK)
    own = channel < C
    follow_the_kernel_ahead(PDL)
    value = tl.load(x + place, mask=inside)
    if residual is not None:
        other = tl.load(residual + place, mask=inside)
    total = widen(value) + widen(tl.load(bias + channel, mask=own))
    if residual is not None:
        other = widen(other)
        if residual_bias is not None:
            other += widen(tl.load(residual_bias + channel, mask=own))
        total += other
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside, cache_modifier=STORE)
