"""GroupNorm, SiLU and replicate padding of a clip in channels-last order; padding with the upsampling before it.

    v = x + x_bias                                              the bias of the convolution ahead, if it left that out
    n = (v - mean(v)) / sqrt(var(v) + eps) * weight + bias      over a group: some channels of all pixels, in float32
    u = n / (1 + exp(-n))                                       SiLU; rounded once, to x's dtype
    y[b, t, h, w, c] = u[b, max(t - frames, 0), clamp(h - height), clamp(w - width), c]

clamp(i) is the nearest index inside. In `upsample_pad`, which only copies, F and S are the factors of frames and
pixels, and u has 1 + (T - 1) * F frames, since the first one is not repeated:

    u[b, t, h, w, c] = x[b, ceil(t / F), h // S, w // S, c]

Source of the semantics: SGLang 0.5.23, `runtime/models/vaes/hunyuanvae.py` (Apache-2.0), which has the clip in the
order [B, C, T, H, W]; the code is our own.

Idea: cuDNN's convolutions work in channels-last order and convert what comes in another one, before and after. With all
tensors in this order no conversion is left, and the C channels of a pixel are one piece of memory: padding copies
pieces. Norm and SiLU are done while they are copied, so what the convolution reads is written once. Before that x is
read for the statistics: of each channel in stretches of pixels, then of each group. A bias of x only shifts the means
of channels, which costs nothing for an element.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Chain, Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import vector_width
from kda_runtime.tuned_table import Table

from .kernels import Form, channels_kernel, groups_kernel, pixels_kernel

# --- configuration and selection

MOST_CHANNELS = 1024
"""A thread has a vector of each pixel of a tile at most."""
MOST_SECOND = 65535
"""Most programs in the second dimension of a grid, and in the third."""
MOST_PIXELS = 2**30
"""Most pixels of a clip, and elements of a line: they are counted in 32 bits, up to the end of the last program's."""
GROUP_WARPS, GROUP_ELEMENTS = 8, 4096
"""Warps of a program of `groups_kernel`, and means that it reads at a time."""
INTERPRETED = 60_000
"""Most elements of the output for Triton's interpreter, which takes some 10 ms a program."""


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int = 4
    vectors: int = 2
    """16-byte vectors of a thread in the kernel that writes the output."""
    tiles: int = 4
    """Vectors of a thread that are loaded at a time in the kernel that computes the statistics of channels."""
    stretches: int = 1056
    """Most programs of that kernel for a clip."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "group_norm_silu_pad", Config)
"""Tuned configurations, chosen by `bytes` (of the output)."""


# --- plan


class Call(NamedTuple):
    """The arguments of one call of `group_norm_silu_pad`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    x_bias: torch.Tensor | None
    num_groups: int
    eps: float
    frames: int
    height: int
    width: int

    @property
    def form(self) -> Form:
        """What is done with the pixels."""
        return Form(self.frames, self.height, self.width, 1, 1)


class Copy(NamedTuple):
    """The arguments of one call of `upsample_pad`."""

    x: torch.Tensor
    up_frames: int
    up_space: int
    frames: int
    height: int
    width: int

    @property
    def form(self) -> Form:
        """What is done with the pixels."""
        return Form(self.frames, self.height, self.width, self.up_frames, self.up_space)


def output_of(call: Call | Copy) -> torch.Tensor:
    """A tensor of the output's shape and dtype, with one element of memory."""
    batch, t, h, w, channels = call.x.shape
    form = call.form
    frames = form.frames + (t - 1) * form.up_frames + 1
    lines, columns = h * form.up_space + 2 * form.height, w * form.up_space + 2 * form.width
    return call.x.new_empty(()).expand(batch, frames, lines, columns, channels)


def plan(call: Call) -> Chain:
    """The launches for a call that the kernels cover; its tensors may be on any device, meta included."""
    x, config, pixels = call.x, _config(call), call.x.shape[1:4].numel()
    batch, channels = x.shape[0], x.shape[4]
    block, rows = tile(x, config.warps)
    turns = triton.cdiv(pixels, rows * config.tiles * config.stretches)
    length = rows * config.tiles * turns
    stretches = triton.cdiv(pixels, length)
    own = channels // call.num_groups
    wide = triton.next_power_of_2(own)
    parts = torch.empty(batch, stretches, 3, channels, dtype=torch.float32, device="meta")
    affine = torch.empty(batch, 3, channels, dtype=torch.float32, device="meta")
    launches = (
        Launch.make(
            channels_kernel,
            (stretches, batch),
            *(parts, x, pixels, length),
            C=channels,
            BLOCK=block,
            ROWS=rows,
            TILES=config.tiles,
            **options(config.pdl, config.warps),
        ),
        Launch.make(
            groups_kernel,
            (call.num_groups, batch),
            *(affine, parts, call.weight, call.bias, call.x_bias, pixels, stretches, length),
            EPS=float(call.eps),
            C=channels,
            CHANNELS=own,
            WIDE=wide,
            ROWS=max(GROUP_ELEMENTS // wide, 1),
            **options(config.pdl, GROUP_WARPS),
        ),
        _written(call, config, affine),
    )
    # The table: y, the two scratch tensors, x, weight, bias and x_bias.
    vectors = (4, 5) if call.x_bias is None else (4, 5, 6)
    output = torch.empty_like(output_of(call), device="meta", memory_format=torch.contiguous_format)
    return Chain(launches, ((1, 3), (2, 1, *vectors), (0, 3, 2)), outputs=(output,), scratch=(parts, affine))


def plan_copy(call: Copy) -> Launch:
    """The launch for a call that the kernel covers; its tensor may be on any device, meta included."""
    return _written(call, _config(call), None)


def _written(call: Call | Copy, config: Config, affine: torch.Tensor | None) -> Launch:
    """The launch that writes the output."""
    y = output_of(call)
    batch, frames, lines, columns, channels = y.shape
    block, rows = tile(call.x, config.warps * config.vectors)
    return Launch.make(
        pixels_kernel,
        (triton.cdiv(columns, rows), lines, batch * frames),
        *(y, call.x, affine),
        *(*call.x.shape[1:4], lines, columns),
        FORM=call.form,
        C=channels,
        BLOCK=block,
        ROWS=rows,
        # Approximations are for 16-bit outputs, which have few enough digits; the interpreter does not have them.
        FAST=y.itemsize == 2 and not is_interpreted(pixels_kernel),
        STORE=config.store,
        **options(config.pdl, config.warps),
    )


def _config(call: Call | Copy) -> Config:
    major, y = capability(call.x), output_of(call)
    config = TUNED.select(major, bytes=y.numel() * y.itemsize)
    return replace(config, pdl=config.pdl and pdl_works(pixels_kernel, major))


def tile(x: torch.Tensor, vectors: int) -> tuple[int, int]:
    """Channels, as a power of two, and pixels of a tile of so many vectors for each of 32 threads."""
    block = triton.next_power_of_2(x.shape[4])
    return block, max(vector_width(vectors, x.itemsize) // block, 1)


def options(pdl: bool, warps: int) -> dict[str, int | bool]:
    """A constant of every kernel, and compiler options."""
    return {"PDL": pdl, "num_warps": warps, "launch_pdl": pdl}


# --- what is wrong with a call, what the kernels cover, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    _check_form(call, expect)
    channels, groups = call.x.shape[4], call.num_groups
    expect(groups > 0, "num_groups", "a positive integer", groups)
    expect(channels % groups == 0, "num_groups", f"a divisor of x's {channels} channels", groups)
    for name, vector in given(call).items():
        expect(name == "x" or list(vector.shape) == [channels], name, f"shape {[channels]}", list(vector.shape))


def _check_form(call: Call | Copy, expect: Expect) -> None:
    x = call.x
    expect(x.dim() == 5, "x", "five dimensions [B, T, H, W, C]", list(x.shape))
    for name, number in call.form._asdict().items():
        least = 1 if name.startswith("up_") else 0
        expect(number >= least, name, f"{least} or more", number)
    expect(x.shape[1:4].numel() > 0, "x", "a frame, a line and a column to repeat", list(x.shape))


def _uncovered(call: Call | Copy) -> str | None:
    """Why the kernels cannot take this call on any device, or None."""
    for name, tensor in given(call).items():
        if not tensor.is_contiguous():
            return f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; the kernels take no gaps"
    y = output_of(call)
    batch, frames, lines, columns, channels = y.shape
    if call.x.is_cpu and is_interpreted(pixels_kernel) and y.numel() > INTERPRETED:
        return f"the output has {y.numel()} elements; Triton's interpreter is given up to {INTERPRETED}"
    if channels > MOST_CHANNELS:
        return f"x has {channels} channels; the kernels take up to {MOST_CHANNELS}"
    if max(batch * frames, lines) > MOST_SECOND or max(y.shape[1:4].numel(), columns * channels) > MOST_PIXELS:
        return f"the output has shape {list(y.shape)}; the kernels' grid does not hold it"
    return unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same in PyTorch, for whatever the kernels do not cover."""
    x = call.x
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = (
        (x.to(wide) + (0 if call.x_bias is None else call.x_bias.to(wide)))
        .flatten(1, 3)
        .unflatten(2, (call.num_groups, x.shape[4] // call.num_groups))
    )
    for _ in range(2):  # what rounding the first mean left in is large beside few elements that are close together
        rows = rows - rows.mean(dim=(1, 3), keepdim=True)
    rows = rows * torch.rsqrt(rows.square().mean(dim=(1, 3), keepdim=True) + call.eps)
    y = rows.reshape(x.shape) * call.weight.to(wide) + call.bias.to(wide)
    return _padded(torch.nn.functional.silu(y).to(x.dtype), call.form)


def _copied(call: Copy) -> torch.Tensor:
    """The same for the op without a norm."""
    return _padded(call.x, call.form)


def _padded(x: torch.Tensor, form: Form) -> torch.Tensor:
    _, t, h, w, _ = x.shape
    times = torch.arange(-form.frames, (t - 1) * form.up_frames + 1, device=x.device).clamp(min=0)
    x = x.index_select(1, (times + form.up_frames - 1) // form.up_frames)
    for dim, size, margin in ((2, h * form.up_space, form.height), (3, w * form.up_space, form.width)):
        at = torch.arange(-margin, size + margin, device=x.device).clamp(0, size - 1)
        x = x.index_select(dim, at // form.up_space)
    return x.contiguous()


# --- public functions

NORM = Op(
    "group_norm_silu_pad",
    Call,
    kernel=pixels_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=(output_of,),
    contiguous=True,
)
UPSAMPLE = Op(
    "upsample_pad",
    Copy,
    kernel=pixels_kernel,
    plan=plan_copy,
    plain=_copied,
    check=_check_form,
    uncovered=_uncovered,
    outputs=(output_of,),
    contiguous=True,
    names={"x": "source"},
    exact=(plan_copy, _copied),
)


@NORM.public
def group_norm_silu_pad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    x_bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    frames: int,
    height: int,
    width: int,
) -> torch.Tensor:
    """GroupNorm, SiLU, and the edges repeated, of a clip in channels-last order.

    Args:
        x: [B, T, H, W, C], contiguous, float16, bfloat16 or float32.
        weight: [C].
        bias: [C].
        x_bias: [C], added to x first; or None.
        num_groups: how many groups the channels are divided into, evenly.
        eps: added to the variance.
        frames: how often the first frame is repeated before it.
        height: lines at either side of a frame.
        width: columns at either side of a frame.

    Returns:
        [B, frames + T, H + 2 * height, W + 2 * width, C], contiguous, x's dtype.

    Other dtypes, tensors with gaps and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return NORM.call(x, weight, bias, x_bias, num_groups, eps, frames, height, width)


@UPSAMPLE.public
def upsample_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> torch.Tensor:
    """A clip in channels-last order with its frames and pixels repeated, as by nearest upsampling, and then its edges.

    Args:
        source: [B, T, H, W, C], contiguous, float16, bfloat16 or float32.
        up_frames: how often every frame but the first is repeated.
        up_space: how often every line and every column is repeated.
        frames: how often the first frame is repeated before it.
        height: lines at either side of an upsampled frame.
        width: columns at either side of an upsampled frame.

    Returns:
        [B, frames + 1 + (T - 1) * up_frames, H * up_space + 2 * height, W * up_space + 2 * width, C], contiguous,
        source's dtype: every element is a copy.

    Other dtypes, tensors with gaps and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return UPSAMPLE.call(source, up_frames, up_space, frames, height, width)
