"""Replicate padding of a clip before a causal convolution, also with the upsampling before it: one Triton kernel.

    u[b, c, t, h, w] = x[b, c, ceil(t / F), h // S, w // S]        F, S: factors of frames and pixels; 1, 1: u is x
    y[b, c, t, h, w] = u[b, c, max(t - frames, 0), clamp(h - height), clamp(w - width)]

clamp(i) is the nearest index inside. The first frame is not repeated by F: u has 1 + (T - 1) * F frames.

Source of the semantics: SGLang 0.5.23, `runtime/models/vaes/hunyuanvae.py` (Apache-2.0), which calls `F.interpolate`,
`torch.cat` and `F.pad`; the code is our own.

Idea: the op only copies, so every byte of x is read once from memory and y is written once. PyTorch's kernels give a
thread one element, and upsampling, concatenation and padding each write what the next one reads. Here a thread writes
pairs of neighbours. Both come from one line of x. A program has one frame of some channels, which share all places. The
division by the length of a line is a product and a shift, with factors that the host computes, so a new size compiles
nothing.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead
from kda_runtime.tuned_table import Table

# --- configuration and selection

MOST = 2**31 - 2**16
"""Elements of a frame, and frames of all channels, are less than this: what the last program counts fits an int32."""
DEEPEST = 2**16
"""Frames of a channel, and channels, are fewer than this: the grid has a dimension for each."""
CACHE_LINE = 128
"""Bytes."""
INTERPRETED = 2**16
"""Items of a program in Triton's interpreter, for frames with more: a large program takes it little longer."""


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    items: int
    """Pairs of a thread: the loads it has in flight are twice as many."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    align: bool = False
    """Programs of one channel begin at lines of the cache, so that no two of them write to one."""
    channels: int = 1
    """Most channels of a program, which share what is computed of places."""


TUNED = Table(__file__, "causal_pad", Config)
"""Tuned configurations, chosen by `bytes` (of the output)."""


class Divisor(NamedTuple):
    """A divisor d > 1 of numbers n below 2^31: n // d is the upper half of n * factor, shifted right by `shift`."""

    factor: int
    """ceil(2^(32 + shift) / d) or one more, which fits 32 bits; less 2^32, as a signed argument."""
    shift: int


def divisor(d: int) -> Divisor:
    """The `Divisor` of d (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994)."""
    shift = (d - 1).bit_length() - 1
    return Divisor((1 << (32 + shift)) // d + 1 - (1 << 32), shift)


# --- kernel


class Form(NamedTuple):
    """What is fixed by the layer, constants of the kernel."""

    frames: int
    """Frames before the first one; lines and columns at either side follow."""
    height: int
    width: int
    up_frames: int
    """Factors of the upsampling."""
    up_space: int


@triton.jit
def divided(n, factor, shift):
    """Quotient n // d, see `Divisor`."""
    return (tl.umulhi(n.to(tl.uint32), factor.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def repeated(at, FACTOR: tl.constexpr):
    """Which element the number `at`, 0 or more, is a copy of, if each has FACTOR copies."""
    return (at.to(tl.uint32) // FACTOR).to(tl.int32) if FACTOR > 1 else at


SIZES = ["items", "t", "h", "w", "back", "by_columns", "columns_shift"]
"""Arguments of the kernel with which nothing is compiled again."""


@triton.jit(do_not_specialize=SIZES)
def causal_pad_kernel(
    y,  # [B * C, frames, items * PAIR]
    x,  # [B * C, t, h, w]
    items,  # of a frame of y: pairs, or elements
    t,
    h,
    w,
    back,  # minus the elements of a line of y
    by_columns,  # `Divisor` of the items of a line of y
    columns_shift,
    FORM: tl.constexpr,  # a `Form`
    PAIR: tl.constexpr,  # 2: y's lines have even lengths; else 1
    BLOCK: tl.constexpr,  # items of a program
    ALIGN: tl.constexpr,  # programs begin at multiples of so many elements in memory
    CHANNELS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: the same BLOCK items of one frame of CHANNELS channels."""
    frame, channel = tl.program_id(1), tl.program_id(2) * CHANNELS
    before = (channel * tl.num_programs(1) + frame).to(tl.int64) * (items * PAIR)
    begin = tl.multiple_of(tl.program_id(0) * (BLOCK * PAIR) - (before % ALIGN).to(tl.int32), PAIR)
    item = tl.maximum(begin // PAIR + tl.arange(0, BLOCK), 0)
    line = divided(item, by_columns, columns_shift)
    first = (item * PAIR - FORM.width) + line * back
    line = tl.minimum(tl.maximum(line - FORM.height, 0), h * FORM.up_space - 1)
    second, last = first + 1, w * FORM.up_space - 1
    # With pairs and a margin of at most one column, the first is never beyond the last column, nor the second before
    # the first one.
    if PAIR == 1 or FORM.width > 1:
        first, second = tl.minimum(first, last), tl.maximum(second, 0)
    first, second = tl.maximum(first, 0), tl.minimum(second, last)
    line = repeated(line, FORM.up_space) * w

    follow_the_kernel_ahead(PDL)

    source = repeated(tl.maximum(frame - FORM.frames, 0) + (FORM.up_frames - 1), FORM.up_frames)
    x += (channel * t + source).to(tl.int64) * (h * w)
    loaded = ()
    for _ in tl.static_range(CHANNELS):
        value = tl.load(x + (line + repeated(first, FORM.up_space)))
        if PAIR == 2:
            value = tl.join(value, tl.load(x + (line + repeated(second, FORM.up_space)))).reshape(2 * BLOCK)
        loaded += (value,)
        x += t.to(tl.int64) * (h * w)
    y += before
    place = begin + tl.arange(0, PAIR * BLOCK)
    inside = place.to(tl.uint32) < (items * PAIR).to(tl.uint32)
    for one in tl.static_range(CHANNELS):
        tl.store(y + place, loaded[one], mask=inside, cache_modifier=STORE)
        y += tl.num_programs(1).to(tl.int64) * (items * PAIR)


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    x: torch.Tensor
    frames: int
    height: int
    width: int
    up_frames: int
    up_space: int


def output_of(call: Call) -> torch.Tensor:
    """A tensor of the output's shape and dtype, with one element of memory."""
    x, *form = call
    *leading, t, h, w = x.shape
    frames, height, width, up_frames, up_space = form
    sizes = ((t - 1) * up_frames + 1 + frames, h * up_space + 2 * height, w * up_space + 2 * width)
    return x.new_empty(()).expand(*leading, *sizes)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, *form = call
    y = output_of(call)
    *_, t, h, w = x.shape
    *_, frames, lines, columns = y.shape
    major = capability(x)
    config = TUNED.select(major, bytes=y.numel() * y.itemsize)
    pair = 2 if columns % 2 == 0 and columns > 2 else 1
    items, block = lines * (columns // pair), config.warps * 32 * config.items
    if is_interpreted(causal_pad_kernel) and items > INTERPRETED:
        block = INTERPRETED
    channels = gcd(config.channels, x.shape[0] * x.shape[1])
    align = CACHE_LINE // y.itemsize if config.align and channels == 1 else 1
    pdl = config.pdl and pdl_works(causal_pad_kernel, major)
    return Launch.make(
        causal_pad_kernel,
        (triton.cdiv(items + (align - 1) // pair, block), frames, x.shape[0] * x.shape[1] // channels),
        y,
        x,
        *(items, t, h, w),
        *(-columns, *divisor(columns // pair)),
        FORM=Form(*form),
        PAIR=pair,
        BLOCK=block,
        ALIGN=align,
        CHANNELS=channels,
        PDL=pdl,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.x.dim() == 5, "x", "five dimensions [B, C, T, H, W]", list(call.x.shape))
    for name, least in (("frames", 0), ("height", 0), ("width", 0), ("up_frames", 1), ("up_space", 1)):
        expect(getattr(call, name) >= least, name, f"{least} or more", getattr(call, name))
    sizes = call.x.shape[2:]
    expect(sizes.numel() > 0, "x", "a frame, a line and a column to repeat", list(call.x.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if not call.x.is_contiguous():
        return f"x has shape {list(call.x.shape)} and strides {call.x.stride()}; the kernel takes contiguous tensors"
    *leading, frames, lines, columns = output_of(call).shape
    channels = prod(leading)
    if columns < 2:
        return f"the output has {columns} columns; the kernel writes two or more"
    if max(frames, channels) >= DEEPEST or max(lines * columns, channels * frames) >= MOST:
        return (
            f"the output has {channels} channels of {frames} frames of {lines * columns} elements; the kernel's grid "
            "does not hold them"
        )
    return unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same in PyTorch, for whatever the kernel does not cover."""
    x, frames, height, width, up_frames, up_space = call
    *_, t, h, w = x.shape
    times = torch.arange(-frames, (t - 1) * up_frames + 1, device=x.device).clamp(min=0)
    x = x.index_select(2, (times + up_frames - 1) // up_frames)
    for dim, size, margin in ((3, h * up_space, height), (4, w * up_space, width)):
        at = torch.arange(-margin, size + margin, device=x.device).clamp(0, size - 1)
        x = x.index_select(dim, at // up_space)
    return x.contiguous()


# --- public functions


def _op(name: str, **more: object) -> Op[Call]:
    return Op(
        name,
        Call,
        kernel=causal_pad_kernel,
        plan=plan,
        plain=_plain,
        check=_check,
        uncovered=_uncovered,
        outputs=(output_of,),
        contiguous=True,
        exact=(plan, _plain),
        **more,  # type: ignore[arg-type]
    )


PAD = _op("causal_pad", fixed={"up_frames": 1, "up_space": 1})
UPSAMPLE = _op("upsample_causal_pad", names={"x": "source"})


@PAD.public
def causal_pad(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """A clip with its edges repeated: its first frame, and the lines and columns at either side.

    Args:
        x: [B, C, T, H, W], float16, bfloat16 or float32.
        frames: how often the first frame is repeated before it.
        height: lines at either side of a frame.
        width: columns at either side of a frame.

    Returns:
        [B, C, frames + T, H + 2 * height, W + 2 * width], contiguous, x's dtype: bit for bit
        `torch.nn.functional.pad(x, (width, width, height, height, frames, 0), mode="replicate")`.

    Other dtypes, tensors with gaps and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return PAD.call(x, frames, height, width, 1, 1)


@UPSAMPLE.public
def upsample_causal_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """A clip with its frames and pixels repeated, as by nearest upsampling, and then its edges, as by `causal_pad`.

    Args:
        source: [B, C, T, H, W], float16, bfloat16 or float32.
        up_frames: how often every frame but the first is repeated.
        up_space: how often every line and every column is repeated.
        frames: how often the first frame is repeated before it.
        height: lines at either side of an upsampled frame.
        width: columns at either side of an upsampled frame.

    Returns:
        [B, C, frames + 1 + (T - 1) * up_frames, H * up_space + 2 * height, W * up_space + 2 * width], contiguous,
        source's dtype: bit for bit what PyTorch's `interpolate`, `cat` and `pad` give.

    Other dtypes, tensors with gaps and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return UPSAMPLE.call(source, frames, height, width, up_frames, up_space)
