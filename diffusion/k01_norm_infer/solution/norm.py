"""LayerNorm or RMSNorm of every row: one Triton kernel for both public functions, launched directly.

    LayerNorm:  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias        over a row, in float32
    RMSNorm:    y = x / sqrt(mean(x^2) + eps) * weight + bias

`weight` and `bias` may be left out of `norm_infer`; `triton_one_pass_rms_norm` has a weight and no bias. Rounding to
the output's dtype happens once, at the end.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/norm.py` and `rmsnorm_onepass.py`
(Apache-2.0); the code is our own.

Idea: the op only streams, every byte of x is read once and every byte of y written once, so the kernel is built to
issue little besides 16-byte loads and stores. A program takes one or more whole rows and holds them in registers: all
loads of x are issued before the first use, the statistics are two passes over registers (mean, then centred squares),
and a row's weight and bias are loaded once for all rows of the program. A row that is no power of two is cut into
chunks of one 16-byte vector a thread, so that 5120 columns are 5 x 1024 without a mask, not 8192 with one.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.broadcast import row_stride
from kda_runtime.checks import Expect, capability, given, output_strides, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import (
    follow_the_kernel_ahead,
    load_chunk,
    load_row,
    statistics,
    store_chunk,
    vector_width,
    widen,
)
from kda_runtime.tuned_table import Table

MAX_ROW_BYTES = 65536
"""Upstream's bound on a row of x; 16 warps hold such a row in 32 (float32) or 64 registers a thread."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    vectors: int
    """16-byte vectors of x that a thread should have in flight: a program takes as many rows as needed, or one."""
    early: bool = True
    """Load weight and bias before the statistics, at the price of registers."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x, or `evict_first`."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "norm", Config)
"""Tuned configurations, chosen by `width` (columns) and `bytes` (of x)."""


# --- kernel


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    y,  # [ROWS, N]; may be x itself
    x,  # [ROWS, N]
    weight,  # [N] or None
    bias,  # [N] or None
    rows,  # number of rows; None where every program has its full number of rows, so that no mask is needed
    # Strides and eps are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,  # rows of a tile, which are reduced together
    TILES: tl.constexpr,
    REPEAT: tl.constexpr,  # load weight and bias for every row of a tile
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: ROWS * TILES whole rows, each in ceil(N / BLOCK) chunks."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64) * (ROWS * TILES)
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # A program's first row is addressed in 64 bits; offsets from there fit 32, unless rows are very far apart.
    if ROWS * TILES * X_STRIDE >= 2**31 or ROWS * TILES * Y_STRIDE >= 2**31:
        row = row.to(tl.int64)
    x += first * X_STRIDE
    y += first * Y_STRIDE
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    # Where the threads hold several rows side by side, weight and bias are loaded once per row, so that every thread
    # loads the vector that it needs. One row for all would be loaded value by value and spread through shared memory.
    affine = col + 0 * row if REPEAT else col

    follow_the_kernel_ahead(PDL)

    # Loads of all tiles first: a thread keeps them in flight.
    loaded = ()
    for tile in tl.static_range(TILES):
        at = tile * ROWS + row  # [ROWS, 1]
        inside = None if rows is None else first + at < rows
        loaded += (load_row(x + at * X_STRIDE, col, inside, N, BLOCK, LOAD),)
    if EARLY:
        weights = load_row(weight, affine, None, N, BLOCK, "")
        biases = load_row(bias, affine, None, N, BLOCK, "")

    for tile in tl.static_range(TILES):
        at = tile * ROWS + row
        inside = None if rows is None else first + at < rows
        mean, scale = statistics(loaded[tile], col, EPS, N, BLOCK, RMS, False)
        for chunk in tl.static_range(CHUNKS):
            value = widen(loaded[tile][chunk])
            if not RMS:
                value -= mean
            value *= scale
            if weight is not None:
                each = weights[chunk] if EARLY else load_chunk(weight, affine, None, chunk, N, BLOCK, "")
                value *= widen(each)
            if bias is not None:
                each = biases[chunk] if EARLY else load_chunk(bias, affine, None, chunk, N, BLOCK, "")
                value += widen(each)
            store_chunk(y + at * Y_STRIDE, value, col, inside, chunk, N, BLOCK, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of either op, in the kernel's order."""

    out: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    is_rms_norm: bool


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, out = call.x, call.out
    width = x.shape[-1]
    rows = x.numel() // width
    major = capability(x)
    config = TUNED.select(major, width=width, bytes=x.nbytes)
    vector = vector_width(config.warps, x.itemsize)
    block = min(triton.next_power_of_2(width), vector)
    # Rows narrower than one vector of all threads lie side by side in a tile, and a program has `vectors` tiles.
    tile, tiles = vector // block, config.vectors
    if block == vector:
        tile, tiles = _power_of_two_below(max(config.vectors * vector // width, 1)), 1
    pdl = config.pdl and pdl_works(norm_kernel, major)
    return Launch.make(
        norm_kernel,
        (-(-rows // (tile * tiles)),),
        x if out is None else out,
        x,
        call.weight,
        call.bias,
        rows if rows % (tile * tiles) else None,
        X_STRIDE=row_stride(x),
        Y_STRIDE=width if out is None else row_stride(out),
        EPS=float(call.eps),
        N=width,
        RMS=bool(call.is_rms_norm),
        BLOCK=block,
        ROWS=tile,
        TILES=tiles,
        REPEAT=block < vector,
        EARLY=config.early,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def _power_of_two_below(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def _ready(call: Call) -> Call:
    """The call with an x that the kernel can read: x itself if its rows are evenly spaced, else a copy, as upstream's.

    x is also copied where it has gaps and `out` is given: `out` may then overlap x in any way, and upstream allows it.
    """
    x = call.x
    if x.is_contiguous():
        return call
    fits = call.out is None and scattered({"x": x}) is None and row_stride(x) is not None
    # The output is `empty_like` x, which keeps the order of x's strides: it has to be upstream's layout.
    if fits and output_strides(x) == torch.empty(x.shape, device="meta").stride():
        return call
    return call._replace(x=x.contiguous())


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that `norm_infer` has no meaning for."""
    shape = list(call.x.shape)
    expect(len(shape) == 2, "x", "two dimensions [rows, columns]", shape)
    for name, tensor in given(call).items():
        wanted, why = (shape, ", as x") if name in ("x", "out") else (shape[-1:], "")
        expect(list(tensor.shape) == wanted, name, f"shape {wanted}{why}", list(tensor.shape))


def _check_one_pass(call: Call, expect: Expect) -> None:
    """The same for `triton_one_pass_rms_norm`."""
    x, weight = call.x, call.weight
    assert weight is not None
    expect(x.dim() > 0, "x", "one dimension or more [..., columns]", list(x.shape))
    expect(weight.numel() == x.shape[-1], "weight", f"{x.shape[-1]} elements", list(weight.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x, out = call.x, call.out
    if x.shape[-1] * x.itemsize > MAX_ROW_BYTES:
        return f"a row has {x.shape[-1] * x.itemsize} bytes; the kernel takes up to {MAX_ROW_BYTES}"
    for name, tensor in given(call).items():
        if name in ("weight", "bias") and not tensor.is_contiguous():
            return f"{name} has gaps; the kernel takes vectors along it"
    if out is not None and not out.is_contiguous():
        rows, width = out.shape
        if rows > 1 and out.stride(1) == 1 and out.stride(0) < width:
            return f"out has stride {out.stride(0)} between rows of {width}: several of its elements share memory"
    return unfit(given(call)) or (None if out is None else scattered({"out": out}))


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x, out = call.x.contiguous(), call.out
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if not call.is_rms_norm:
        y = y - y.mean(dim=-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + call.eps)
    if call.weight is not None:
        y = y * call.weight.reshape(-1).to(wide)
    if call.bias is not None:
        y = y + call.bias.to(wide)
    return y.to(x.dtype) if out is None else out.copy_(y)


# --- public functions

_op = partial(
    Op[Call],
    arguments=Call,
    kernel=norm_kernel,
    plan=plan,
    plain=_plain,
    uncovered=_uncovered,
    ready=_ready,
    outputs=("x",),
    contiguous=True,
)
NORM_INFER = _op("norm_infer", check=_check, into="out")
ONE_PASS = _op(
    "triton_one_pass_rms_norm",
    check=_check_one_pass,
    required=("weight",),
    names={"weight": "w"},
    fixed={"is_rms_norm": True},
)


@NORM_INFER.public
def norm_infer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm or RMSNorm of every row.

    Args:
        x: [rows, columns], float16, bfloat16 or float32; a row has at most 64 KiB, rows may be apart from each other.
        weight: [columns], or None for 1.
        bias: [columns], or None for 0.
        eps: added to the variance or the mean square.
        is_rms_norm: RMSNorm instead of LayerNorm.
        out: what to write into, of x's shape; x itself is allowed. Its dtype may differ from x's.

    Returns:
        `out` where it is given, else a new contiguous tensor like x.

    Other dtypes and wider rows, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    y = NORM_INFER.call(out, x, weight, bias, eps, is_rms_norm)
    return out if y is None else y


@ONE_PASS.public
def triton_one_pass_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., columns], float16, bfloat16 or float32.
        w: the weight, as many elements as columns.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor like x.

    Other dtypes, rows above 64 KiB, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return ONE_PASS.call(None, x, w, None, eps, True)
